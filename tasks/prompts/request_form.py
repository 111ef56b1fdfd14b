"""How every row of a workload is asked: what its requests have in common."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from engine.errors import WorkloadError
from engine.planning.plan import Plan
from engine.request import Mode, Request
from tasks.prompts.prompt import PromptFormat, build_prompt_format
from tasks.prompts.text_codec import TextCodec
from tasks.workloads.workload import Prompt, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestForm:
    """Made by `RequestForm.of`.

    Attributes:
        settings: parameters of `engine.Request`, the same for all rows.
        num_answer_tokens: of the longest answer that there can be.
    """

    mode: Mode
    settings: Mapping[str, Any]
    num_answer_tokens: int

    @classmethod
    def of(cls, workload: Workload, codec: TextCodec | None, expected_output_tokens: int | None) -> "RequestForm":
        """The form of a workload.

        Args:
            codec: of the model; only mode "score" needs one, for its labels.
            expected_output_tokens: see `AnswerLength.expected_output_tokens`.
        Raises:
            ModelError, WorkloadError: see `build_prompt_format` and `encode_labels`.
        """
        if workload.mode == "generate":
            settings = asdict(workload.decoding) | {"expected_output_tokens": expected_output_tokens}
            return cls(mode="generate", settings=settings, num_answer_tokens=workload.decoding.max_new_tokens)
        assert codec is not None, "labels need a tokenizer"
        labels = _encode_labels_once(workload.labels, workload.prompt, codec)
        return cls(mode="score", settings={"labels": labels}, num_answer_tokens=max(map(len, labels)))

    def ask(self, rows: Plan) -> list[Request]:
        """A request a row, named by its row id; by row id, as the groups of `Plan.groups` number them."""
        row_ids, priorities = rows.row_id.tolist(), rows.priority.tolist()
        return [
            Request(
                request_id=str(row_ids[row]),
                token_ids=rows.prompts[row],
                mode=self.mode,
                priority=priorities[row],
                **self.settings,
            )
            for row in np.argsort(rows.row_id).tolist()
        ]


def encode_labels(labels: Sequence[str], prompt: PromptFormat, codec: TextCodec) -> list[tuple[int, ...]]:
    """Token ids of each label as it follows a prompt.

    The label is encoded behind the text that ends every prompt, and what is added to that text's ids is the label's.
    Where the two would melt into one token, the label is encoded alone: the prompt's own tokens never change.

    Args:
        labels: in the order of the workload.
        prompt: whose ending the labels follow.
        codec: the model's tokenizer.
    Raises:
        WorkloadError: a label has no tokens, or the same ones as another.
    """
    ending = prompt.ending or "\n"
    known, *both = codec.encode([ending, *(ending + codec.trust(label) for label in labels)], add_special_tokens=False)
    alone = codec.encode([codec.trust(label) for label in labels], add_special_tokens=False)
    found: dict[tuple[int, ...], str] = {}
    for label, joined, single in zip(labels, both, alone, strict=True):
        follows = joined[: len(known)] == known and len(joined) > len(known)
        token_ids = tuple(joined[len(known) :] if follows else single)
        if not token_ids:
            raise WorkloadError(f"label {label!r} has no tokens with this model's tokenizer")
        if token_ids in found:
            raise WorkloadError(f"labels {found[token_ids]!r} and {label!r} are the same tokens {list(token_ids)}")
        found[token_ids] = label
    return list(found)


@lru_cache(maxsize=1)
def _encode_labels_once(labels: tuple[str, ...], prompt: Prompt, codec: TextCodec) -> tuple[tuple[int, ...], ...]:
    """Tokenization, prediction and inference of a workload ask with the same labels."""
    return tuple(encode_labels(labels, build_prompt_format(prompt, codec), codec))
