"""Checks before any timing that each engine gives the answers of a float32 transformers model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.measuring.batch import Batch
from benchmarks.peers.process import PeerProcess
from benchmarks.peers.protocol import Answers

NEAR_TIE = 1e-3
"""Two logits closer than this may be ranked either way by float32 arithmetic in another order."""

MOST_LABEL_ERROR = 1e-3


@dataclass(slots=True)
class Verdict:
    """How an engine's float32 answers compare with the referee's.

    Attributes:
        num_greedy: answers in which every token has the best logit.
        num_near_ties: other answers whose every token is within NEAR_TIE of the best.
        largest_gap: of any token's logit to the best one.
        largest_label_error: of any label's log-probability.
        first_wrong: the first answer that is neither, or None: workload, request, position, gap.
        failure: why the engine gave no answers, or None.
    """

    num_answers: int = 0
    num_greedy: int = 0
    num_near_ties: int = 0
    largest_gap: float = 0.0
    largest_label_error: float = 0.0
    first_wrong: dict[str, Any] | None = None
    failure: str | None = None

    @property
    def is_right(self) -> bool:
        return self.failure is None and self.first_wrong is None and self.num_answers > 0

    @property
    def text(self) -> str:
        if self.failure is not None:
            return f"failed: {self.failure}"
        counts = f"{self.num_greedy} of {self.num_answers} answers exactly greedy"
        if self.num_near_ties:
            counts += f", {self.num_near_ties} after near ties (logits within {self.largest_gap:.1e})"
        if self.first_wrong is None:
            return counts
        wrong = self.first_wrong
        return (
            f"wrong: {wrong['workload']}, request {wrong['request']}, position {wrong['position']}: "
            f"{wrong['error']:.3g} from the best; {counts}"
        )


class Referee:
    """Judges answers; equal ones are judged once."""

    def __init__(self, process: PeerProcess, timeout_seconds: float) -> None:
        self._process = process
        self._timeout_seconds = timeout_seconds
        self._gaps: dict[tuple[str, int, tuple[int, ...]], list[float]] = {}
        self._labels: dict[str, list[list[float]]] = {}

    def judge(self, batch: Batch, prompts: Sequence[Sequence[int]], answers: Answers, verdict: Verdict) -> None:
        """Adds an engine's answers to a batch's prompts to its verdict."""
        if answers.label_logprobs:
            self._judge_labels(batch, prompts, answers, verdict)
            return
        keys = [(batch.name, index, tuple(tokens)) for index, tokens in enumerate(answers.token_ids)]
        unknown = [key for key in dict.fromkeys(keys) if key not in self._gaps]
        arguments = {"prompts": [list(prompts[index]) for _, index, _ in unknown], "answers": [k[2] for k in unknown]}
        if unknown:
            reply = self._process.call("token_gaps", arguments, self._timeout_seconds)
            self._gaps.update(zip(unknown, reply["answer"]["gaps"], strict=True))
        for key in keys:
            gaps = self._gaps[key]
            wrong = next((position for position, gap in enumerate(gaps) if not gap <= NEAR_TIE), None)  # NaN, too
            verdict.num_answers += 1
            verdict.num_greedy += wrong is None and max(gaps) == 0
            verdict.num_near_ties += wrong is None and max(gaps) > 0
            verdict.largest_gap = max(verdict.largest_gap, *gaps)
            if wrong is not None and verdict.first_wrong is None:
                verdict.first_wrong = _place(batch, key[1], wrong, gaps[wrong])

    def _judge_labels(self, batch: Batch, prompts: Sequence[Sequence[int]], answers: Answers, verdict: Verdict) -> None:
        if batch.name not in self._labels:
            arguments = {"prompts": [list(prompt) for prompt in prompts], "labels": [batch.labels]}
            reply = self._process.call("label_logprobs", arguments, self._timeout_seconds)
            self._labels[batch.name] = reply["answer"]["label_logprobs"]
        expected = self._labels[batch.name]
        for index, (found, right) in enumerate(zip(answers.label_logprobs, expected, strict=True)):
            error = float(np.abs(np.subtract(found, right)).max())
            verdict.num_answers += 1
            is_right = error <= MOST_LABEL_ERROR  # false for NaN
            verdict.num_greedy += is_right
            verdict.largest_label_error = max(verdict.largest_label_error, error)
            if not is_right and verdict.first_wrong is None:
                verdict.first_wrong = _place(batch, index, 0, error)


def _place(batch: Batch, request: int, position: int, error: float) -> dict[str, Any]:
    return {"workload": batch.name, "request": request, "position": position, "error": error}
