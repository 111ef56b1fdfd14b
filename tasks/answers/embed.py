"""``mode = "embed"``: an answer is the embedding of a text, an array of floats; all have the same length."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import pyarrow as pa
from pydantic import StrictBool, StrictInt
from pydantic.dataclasses import dataclass

from engine.completion import Completion
from engine.encoding.families import is_encoder
from engine.errors import WorkloadError
from engine.pooling.sentence_files import check_causal_pooling, read_sentence_files
from tasks.answers.kind import EncodeLabels, PooledKind, TooLong
from tasks.answers.toml_value import CONFIG, Output, must


@dataclass(frozen=True, slots=True, kw_only=True, config=CONFIG)
class Embedding(PooledKind):
    """The embedding of a row's text. `bind` fills settings that the file leaves out from the checkpoint.

    Attributes:
        dimensions: how many of the embedding's first numbers are kept; None for all.
        normalize: whether embeddings are scaled to length 1; None for the checkpoint's default.
        prompt_name: name of the checkpoint's prompt that is put in front of each text; None for the checkpoint's
            default, empty for none.
        too_long: see `TooLong`.
    """

    mode: ClassVar[str] = "embed"

    dimensions: Annotated[StrictInt, must(lambda number: number >= 1, "must be at least 1, got {!r}")] | None = None
    normalize: StrictBool | None = None
    prompt_name: str | None = None
    too_long: TooLong = "truncate"
    output: Output

    def bind(self, template: str, checkpoint: Path) -> tuple[Self, str]:
        """See `AnswerKind.bind`: sets length and normalisation, and puts the prompt in front of the template."""
        files = read_sentence_files(checkpoint)
        if not is_encoder(checkpoint):
            check_causal_pooling(files, checkpoint)
        dimensions = self.dimensions or files.default_dimensions or files.num_dimensions
        if dimensions > files.num_dimensions:
            raise WorkloadError(f"dimensions is {dimensions}, the model's embeddings have {files.num_dimensions}")
        name = files.default_prompt if self.prompt_name is None else self.prompt_name
        if name and name not in files.prompts:
            known = ", ".join(map(repr, files.prompts)) or "none"
            raise WorkloadError(f"prompt_name is {name!r}, which the model does not have; its prompts: {known}")
        prompt = files.prompts[name] if name else ""
        if prompt and not files.pools_prompt:
            raise WorkloadError(f"prompt {name!r}: a model that does not pool its prompt's tokens is not supported")
        bound = replace(
            self,
            dimensions=dimensions,
            normalize=files.is_normalized if self.normalize is None else self.normalize,
            prompt_name="",
        )
        return bound, prompt.replace("{", "{{").replace("}", "}}") + template

    @property
    def part_fields(self) -> Sequence[pa.Field]:
        return [pa.field("embedding", pa.list_(pa.float32()))]

    @property
    def digest_parts(self) -> list[Any]:
        return [self.dimensions, self.normalize, self.too_long]

    @property
    def columns(self) -> Mapping[str, str]:
        return {"embedding": "float[]" if self.dimensions is None else f"float[{self.dimensions}]"}

    def ask(self, encode_labels: EncodeLabels, expected_output_tokens: int | None) -> Sequence[Mapping[str, Any]]:
        return [{"mode": "embed", "dimensions": self.dimensions, "normalize": self.normalize}]

    def read(self, completion: Completion, decode: Callable[[Sequence[int]], str]) -> Mapping[str, Any]:
        return {"embedding": completion.embedding}
