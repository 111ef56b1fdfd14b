"""Models that lack embeddings for some tokens of their tokenizer: which tokens may be unknown, and where."""

from pathlib import Path

from tokenizers import Tokenizer

from engine.errors import ModelError
from engine.model.loading.checkpoint import read_json
from engine.model.loading.config_sizes import find_size
from tasks.prompts.prompt import workload_format
from tasks.prompts.text_codec import TextCodec
from tasks.workloads.workload import Workload


def refuse_unknown(folder: Path, tokenizer: Tokenizer, size: int) -> None:
    """Raises `ModelError` if a model has no embedding for a token of its tokenizer that is not an added one, which
    prompts need not use.

    Args:
        folder: of the checkpoint.
        size: number of tokens that have embeddings.
    """
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    unknown = {token: number for token, number in tokenizer.get_vocab().items() if number >= size}
    if others := [number for token, number in unknown.items() if token not in added]:
        what = f"config.json says vocab_size {size}, its tokenizer has ids up to {max(others)}"
        raise ModelError(f"model {str(folder)!r}: {what}")


def check_prompt(workload: Workload, checkpoint: Path) -> None:
    """Raises `ModelError` if every prompt of a workload has a token for which the model has no embedding; or as
    `workload_format`."""
    codec = TextCodec.load(checkpoint)
    form = workload_format(workload.prompt, workload.kind.thinking, codec)
    text = form.head + "".join(literal for literal, _ in form.segments) + form.tail
    (token_ids,) = codec.encode([text], add_special_tokens=form.is_plain)
    size = find_size(read_json(checkpoint / "config.json"), "vocab_size")
    if (largest := max(token_ids, default=0)) >= size:
        token = codec.tokenizer.id_to_token(largest)
        what = f"config.json says vocab_size {size}, and each prompt has the token {token!r} with id {largest}"
        raise ModelError(f"workload {workload.name!r}: model {str(checkpoint)!r}: {what}")
