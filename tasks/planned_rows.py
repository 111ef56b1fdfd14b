"""All rows of a plan in memory, and any of its partitions as requests and groups."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.prefix_groups import PrefixGroup, rebuild_groups
from engine.request import Request
from tasks.artifact import ArtifactRef, open_parquet
from tasks.plan_prefix import read_token_table
from tasks.prompt import build_prompt_format, encode_labels
from tasks.text_codec import TextCodec
from tasks.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedRows:
    """Rows without error, in the order of the plan: by partition, group, member, row.

    Attributes:
        row_ids: int64 ``[num_rows]``.
        prompts: int32 arrays ``[num_tokens]``, one a row; views of one array.
        group_id, member_id, num_prefix_tokens: the plan's columns.
        partition_starts: int64 ``[num_partitions + 1]``, positions in these.
    """

    row_ids: npt.NDArray[np.int64]
    prompts: Sequence[npt.NDArray[np.int32]]
    group_id: npt.NDArray[np.int64]
    member_id: npt.NDArray[np.int64]
    num_prefix_tokens: npt.NDArray[np.int32]
    partition_starts: npt.NDArray[np.int64]

    @property
    def num_partitions(self) -> int:
        return len(self.partition_starts) - 1

    def groups(self, first_partition: int = 0, num_partitions: int | None = None) -> list[PrefixGroup]:
        """Of consecutive partitions, all by default; request_indices count from the first one's first row."""
        rows = self.rows(first_partition, num_partitions)
        columns = (self.group_id[rows], self.member_id[rows], self.num_prefix_tokens[rows])
        return rebuild_groups(self.prompts[rows], *columns)

    def rows(self, first_partition: int = 0, num_partitions: int | None = None) -> slice:
        """Positions of consecutive partitions' rows."""
        last = self.num_partitions if num_partitions is None else first_partition + num_partitions
        return slice(int(self.partition_starts[first_partition]), int(self.partition_starts[last]))


def read_planned_rows(tokens: ArtifactRef, plan: ArtifactRef) -> PlannedRows:
    """Reads both files whole.

    Raises:
        ArtifactError: one of them is not what its reference says.
    """
    with open_parquet(tokens) as file:
        row_ids, values, offsets = read_token_table(file)
    with open_parquet(plan) as file:
        columns = {name: file.read(columns=[name]).column(0).to_numpy() for name in file.schema_arrow.names}
    positions = np.searchsorted(row_ids, columns["row_id"])
    starts, ends = offsets[positions].tolist(), offsets[positions + 1].tolist()
    partitions = columns["partition"]
    num_partitions = int(partitions[-1]) + 1 if len(partitions) else 0
    return PlannedRows(
        row_ids=columns["row_id"],
        prompts=[values[start:end] for start, end in zip(starts, ends, strict=True)],
        group_id=columns["group_id"],
        member_id=columns["member_id"],
        num_prefix_tokens=columns["num_prefix_tokens"],
        partition_starts=np.searchsorted(partitions, np.arange(num_partitions + 1)),
    )


def make_requests(rows: PlannedRows, workload: Workload, checkpoint: Path) -> list[Request]:
    """A request for each row, as the workload asks it; only the tokenizer of the checkpoint is read."""
    settings: dict[str, Any] = asdict(workload.decoding)
    if workload.mode == "score":
        codec = TextCodec.load(checkpoint)
        settings = {"labels": tuple(encode_labels(workload.labels, build_prompt_format(workload.prompt, codec), codec))}
    return [
        Request(request_id=str(row_id), token_ids=prompt, mode=workload.mode, **settings)
        for row_id, prompt in zip(rows.row_ids.tolist(), rows.prompts, strict=True)
    ]
