"""The same rows as two workloads answer them."""

from pathlib import Path
from typing import Any, NamedTuple

from prefect import task
from prefect.cache_policies import NO_CACHE

from engine.errors import WorkloadError
from tasks.sample import AnsweredRow, take_requests
from tasks.storage.artifact import ArtifactRef
from tasks.workloads.workload import Workload


class PairedRow(NamedTuple):
    """A row with the answers of the first and the second workload; its key is as the second one spells it."""

    first: AnsweredRow
    second: AnsweredRow

    @property
    def is_changed(self) -> bool:
        """Whether the two answers differ; probabilities, scores and thoughts are ignored."""
        return _compared(self.first) != _compared(self.second)


def _compared(row: AnsweredRow) -> tuple[bool, dict[str, Any]]:
    """Whether the row has an error, and the values that count as its answer."""
    hidden = ("_probability", "_probabilities", "_logprobs")
    values = {
        name: value
        for name, value in row.answer.items()
        if name not in ("score", "thinking") and not name.endswith(hidden)
    }
    return row.error is not None, values


def check_comparable(first: Workload, second: Workload) -> None:
    """Raise `WorkloadError` if the workloads' keys or adapters differ, or one gives embeddings."""
    for each in (first, second):
        if each.kind.mode == "embed":
            raise WorkloadError(f"{each.name!r} gives embeddings, which cannot be compared row by row")
    if [name.lower() for name in first.key] != [name.lower() for name in second.key]:
        raise WorkloadError(
            f"{first.name!r} and {second.name!r} answer different rows: "
            f"their keys are {list(first.key)} and {list(second.key)}"
        )
    if first.adapter != second.adapter:
        raise WorkloadError(f"{first.name!r} and {second.name!r} have different adapters; one batch has one of them")


@task(name="take_same_rows", retries=0, cache_policy=NO_CACHE, persist_result=False)
def take_same_rows(workload: Workload, requests: ArtifactRef, chosen: ArtifactRef, target: Path) -> ArtifactRef:
    """Write `target`: the workload's requests for rows that were chosen from another workload, in their order.

    Args:
        requests: of all rows of the workload.
        chosen: requests of the other workload, numbered from 0.
    Raises:
        ArtifactError: the requests are not what their references say, or `target` cannot be written.
    """
    return take_requests("compare/take_same_rows", requests, {"chosen": chosen.path}, target, keys=workload.key)
