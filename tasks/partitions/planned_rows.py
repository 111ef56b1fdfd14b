"""All rows of a plan in memory, and any of its partitions as requests and groups."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.planning.prefix_groups import PrefixGroup, rebuild_groups
from engine.request import Request
from tasks.partitions.partition import rebuild_prompts
from tasks.prompts.request_form import RequestForm
from tasks.storage.artifact import ArtifactRef, open_parquet


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedRows:
    """Rows without error, in the order of the plan: by partition, group, member, row.

    Attributes:
        row_ids: int64 ``[num_rows]``.
        prompts: int32 arrays ``[num_tokens]``, one a row.
        group_id, member_id, num_prefix_tokens, priority: the plan's columns.
        partition_starts: int64 ``[num_partitions + 1]``, positions in these.
    """

    row_ids: npt.NDArray[np.int64]
    prompts: Sequence[npt.NDArray[np.int32]]
    group_id: npt.NDArray[np.int64]
    member_id: npt.NDArray[np.int64]
    num_prefix_tokens: npt.NDArray[np.int32]
    priority: npt.NDArray[np.int64]
    partition_starts: npt.NDArray[np.int64]

    @property
    def num_partitions(self) -> int:
        return len(self.partition_starts) - 1

    def groups(self, first_partition: int = 0, num_partitions: int | None = None) -> list[PrefixGroup]:
        """Of consecutive partitions, all by default; request_indices count from the first one's first row."""
        rows = self.rows(first_partition, num_partitions)
        columns = (self.group_id[rows], self.member_id[rows], self.num_prefix_tokens[rows])
        return rebuild_groups(self.prompts[rows], *columns)

    def ask(self, form: RequestForm) -> list[Request]:
        """A request for each row."""
        return form.ask(self.row_ids, self.prompts, self.priority)

    def rows(self, first_partition: int = 0, num_partitions: int | None = None) -> slice:
        """Positions of consecutive partitions' rows."""
        last = self.num_partitions if num_partitions is None else first_partition + num_partitions
        return slice(int(self.partition_starts[first_partition]), int(self.partition_starts[last]))


def read_planned_rows(plan: ArtifactRef) -> PlannedRows:
    """Reads the file whole.

    Raises:
        ArtifactError: it is not what its reference says.
    """
    with open_parquet(plan) as file:
        rows = file.read()
    partitions = rows.column("partition").to_numpy()
    num_partitions = int(partitions[-1]) + 1 if len(partitions) else 0
    return PlannedRows(
        row_ids=rows.column("row_id").to_numpy(),
        prompts=rebuild_prompts(rows),
        group_id=rows.column("group_id").to_numpy(),
        member_id=rows.column("member_id").to_numpy(),
        num_prefix_tokens=rows.column("num_prefix_tokens").to_numpy(),
        priority=rows.column("priority").to_numpy(),
        partition_starts=np.searchsorted(partitions, np.arange(num_partitions + 1)),
    )
