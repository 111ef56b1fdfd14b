"""Embeddings of an encoder beside sentence-transformers: ``python -m benchmarks.embed [--shape minilm] [--out FILE]``.

A BERT of random weights embeds texts of mixed lengths (log-normal, 4 to 510 words of one token each, 55 in the median)
and texts of equal lengths. Both sides go from texts to float32 vectors, tokenization included, with the same number of
threads and number format; sentence-transformers sorts its batches by length. They take turns in one process, so that
other programs on the machine slow down both; the median of the rounds' ratios is reported. First both sides' float32
embeddings are compared; if they differ, no figures are given.

The share of the matrix ceiling is the rate of the layers' matrix products in operations per second over the best rate
of the same products alone, measured between the rounds.

Goals on a CPU: mixed lengths 1.5 times as fast as sentence-transformers, equal lengths no slower.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.result_file import report
from benchmarks.measuring.turns import in_turn
from benchmarks.measuring.wrong_answer import WrongAnswerError, refuse_wrong_answers
from engine.config import EngineConfig
from engine.encoding.encoder_engine import EncoderEngine
from engine.request import Request
from tasks.prompts.text_codec import TextCodec

SHAPES = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "shallow": {"hidden_size": 384, "num_hidden_layers": 1, "num_attention_heads": 12, "intermediate_size": 64},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
}
NUM_WORDS = 30_000
EQUAL_WORDS = 126
MOST_ERROR = {"float32": 2e-5, "bfloat16": 0.05}
"""Largest allowed error of a component of a normalised embedding."""

Vectors = npt.NDArray[np.float32]


def make_checkpoint(folder: Path, shape: str) -> None:
    """A BERT with random weights and a tokenizer of one token a word, pooled by the mean."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = {word: number for number, word in enumerate([*specials, *(f"w{i:05d}" for i in range(NUM_WORDS))])}
    config = transformers.BertConfig(vocab_size=len(words), **SHAPES[shape])
    torch.manual_seed(7)
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), specials, strict=True))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names).save_pretrained(
        folder
    )


def make_texts(kind: str, num_texts: int, round_number: int) -> list[str]:
    """Texts with other words in each round, but the same lengths."""
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(4.0, 0.9, num_texts).astype(int), 4, 510)
    if kind == "equal":
        lengths[:] = EQUAL_WORDS
    rng = np.random.default_rng(100 + round_number)
    return [" ".join(f"w{word:05d}" for word in rng.integers(0, NUM_WORDS, length)) for length in lengths]


def load_ours(folder: Path, dtype: Any) -> Callable[[list[str]], Vectors]:
    engine = EncoderEngine.load(folder, EngineConfig(dtype=dtype, device="cpu"))
    codec = TextCodec.load(folder)

    def embed(texts: list[str]) -> Vectors:
        prompts = codec.encode(texts, add_special_tokens=True)
        requests = [
            Request(request_id=str(number), token_ids=np.array(prompt, np.int32), mode="embed")
            for number, prompt in enumerate(prompts)
        ]
        return np.stack([answer.embedding for answer in engine.pool(requests)])

    return embed


def load_theirs(folder: Path, dtype: str) -> Callable[[list[str]], Vectors]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})

    def embed(texts: list[str]) -> Vectors:
        vectors: Vectors = model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
        return vectors

    return embed


def check(ours: Vectors, theirs: Vectors, dtype: str) -> float:
    """The largest difference; raises if it is too large."""
    error = float(np.abs(ours - theirs.astype(np.float32)).max())
    if not error <= MOST_ERROR[dtype]:
        raise WrongAnswerError(f"in {dtype} an embedding differs by {error:.1e}, {MOST_ERROR[dtype]:.0e} is allowed")
    return error


def product_sizes(shape: str) -> list[tuple[int, int]]:
    """Inputs and outputs of the products of a layer."""
    hidden, inner = SHAPES[shape]["hidden_size"], SHAPES[shape]["intermediate_size"]
    return [(hidden, hidden)] * 4 + [(hidden, inner), (inner, hidden)]


def ceiling(shape: str, dtype: str) -> float:
    """Operations per second of the layers' products alone; the best of several numbers of rows."""
    sizes = product_sizes(shape)
    kind = getattr(torch, dtype)
    weights = [torch.randn(num_out, num_in, dtype=kind) for num_in, num_out in sizes]
    best = 0.0
    for num_rows in (512, 2048):
        inputs = {num_in: torch.randn(num_rows, num_in, dtype=kind) for num_in, _ in sizes}
        flops = 2 * num_rows * sum(num_in * num_out for num_in, num_out in sizes)
        for _ in range(4):
            started = time.perf_counter()
            for weight in weights:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)
            best = max(best, flops / (time.perf_counter() - started))
    return best


def timed(embed: Callable[[list[str]], Vectors], texts: list[str]) -> tuple[float, float]:
    """Seconds of wall time and of processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    embed(texts)
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(folder: Path, shape: str, dtype: str, num_texts: int, num_rounds: int) -> list[dict[str, Any]]:
    """One result for mixed and one for equal lengths."""
    ours, theirs = load_ours(folder, dtype), load_theirs(folder, dtype)
    weights = SHAPES[shape]["num_hidden_layers"] * sum(num_in * num_out for num_in, num_out in product_sizes(shape))
    rows = []
    for kind in ("mixed", "equal"):
        warm = make_texts(kind, min(num_texts, 64), 0)
        error = check(ours(warm), theirs(warm), dtype)
        runs: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
        best_product, num_tokens = 0.0, 0
        for number in range(1, num_rounds + 1):
            texts = make_texts(kind, num_texts, number)
            num_tokens = sum(text.count(" ") + 3 for text in texts)
            best_product = max(best_product, ceiling(shape, dtype))
            for name, embed in in_turn((("ours", ours), ("theirs", theirs)), number):
                runs[name].append(timed(embed, texts))
        wall = [theirs_[0] / ours_[0] for ours_, theirs_ in zip(runs["ours"], runs["theirs"], strict=True)]
        cpu = [theirs_[1] / ours_[1] for ours_, theirs_ in zip(runs["ours"], runs["theirs"], strict=True)]
        seconds = {name: min(wall for wall, _ in found) for name, found in runs.items()}
        rows.append(
            {
                "dtype": dtype,
                "lengths": kind,
                "num_texts": num_texts,
                "num_tokens": num_tokens,
                "largest_error": error,
                "tokens_per_second": {name: num_tokens / best for name, best in seconds.items()},
                "ratio": statistics.median(wall),
                "cpu_time_ratio": statistics.median(cpu),
                "share_of_matrix_ceiling": 2 * weights * num_tokens / seconds["ours"] / best_product,
                "runs": runs,
            }
        )
    return rows


@refuse_wrong_answers
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints a table, and writes the result file if one is named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embed", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="minilm")
    parser.add_argument("--dtype", nargs="+", choices=list(MOST_ERROR), default=list(MOST_ERROR))
    parser.add_argument("--texts", type=int, default=1000, help="in each run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="result file, JSON")
    options = parser.parse_args(arguments)
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), options.shape)
        check_float32(Path(folder))
        rows = [
            row
            for dtype in options.dtype
            for row in measure(Path(folder), options.shape, dtype, options.texts, options.rounds)
        ]
    print(f"{'format':10}{'lengths':9}{'tokens/s':>10}{'theirs':>10}{'ratio':>8}{'CPU time':>10}{'of ceiling':>12}")
    for row in rows:
        rate = row["tokens_per_second"]
        print(
            f"{row['dtype']:10}{row['lengths']:9}{rate['ours']:10,.0f}{rate['theirs']:10,.0f}{row['ratio']:8.2f}"
            f"{row['cpu_time_ratio']:10.2f}{row['share_of_matrix_ceiling']:12.0%}"
        )
    versions = {name: version(name) for name in ("torch", "transformers", "sentence-transformers")}
    threads = {"num_threads": torch.get_num_threads(), "omp_num_threads": os.environ.get("OMP_NUM_THREADS")}
    report("embed", arguments, options.out, machine=machine, versions=versions, **threads, rows=rows)
    return 0


def check_float32(folder: Path) -> None:
    """Both sides agree in float32 before anything is timed in any format."""
    texts = make_texts("mixed", 40, 0)
    check(load_ours(folder, "float32")(texts), load_theirs(folder, "float32")(texts), "float32")


if __name__ == "__main__":
    sys.exit(main())
