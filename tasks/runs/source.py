"""Where the rows and the model of a flow run come from, and how its prompts are planned."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from engine.planning.plan_partitions import PartitionTokens
from engine.planning.planner import PlanMethod

if TYPE_CHECKING:
    from tasks.cascades.row_choice import RowChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The database, the model's files, and how prompts are planned; the same for all workloads of a flow run.

    Attributes:
        model: as the user named it.
        checkpoint, model_digest: the model's folder and the digest of its content.
        max_model_len: tokens of the longest prompt plus answer.
        full: answer every row again.
        method, partition_tokens, block_size, is_cheapest_first: see `tasks.plan_prefix.write_plan`.
        attach: name to path of what queries may read beside the database.
        choices: by workload name, which of its rows a step of a cascade answers.
    """

    database: Path
    model: str
    checkpoint: Path
    model_digest: str
    max_model_len: int
    full: bool = False
    method: PlanMethod = "exact"
    partition_tokens: PartitionTokens = "auto"
    block_size: int | None = None
    is_cheapest_first: bool = False
    attach: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, "RowChoice"] = field(default_factory=dict)
