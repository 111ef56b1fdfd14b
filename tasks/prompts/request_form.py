"""How every row of a workload is asked: what its requests have in common."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.request import Mode, Request
from tasks.prompts.prompt import build_prompt_format, encode_labels
from tasks.prompts.text_codec import TextCodec
from tasks.workloads.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestForm:
    """Made by `RequestForm.of`.

    Attributes:
        settings: parameters of `engine.Request`, the same for all rows.
    """

    mode: Mode
    settings: Mapping[str, Any]

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
            return cls(mode="generate", settings=settings)
        assert codec is not None, "labels need a tokenizer"
        labels = encode_labels(workload.labels, build_prompt_format(workload.prompt, codec), codec)
        return cls(mode="score", settings={"labels": tuple(labels)})

    def ask(
        self,
        row_ids: npt.NDArray[np.int64],
        prompts: Sequence[npt.NDArray[np.int32]],
        priorities: npt.NDArray[np.int64],
    ) -> list[Request]:
        """A request a row, named by its row id, in the order of the rows.

        Args:
            row_ids, priorities: ``[num_rows]``.
            prompts: token ids, one array a row.
        """
        return [
            Request(request_id=str(row_id), token_ids=prompt, mode=self.mode, priority=priority, **self.settings)
            for row_id, prompt, priority in zip(row_ids.tolist(), prompts, priorities.tolist(), strict=True)
        ]
