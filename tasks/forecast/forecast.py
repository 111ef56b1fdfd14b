"""The result of `explain` for a workload: counts and a simulated run, as plain values for JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.config import EngineConfig
from engine.keeping.read_rate import measure_read_rate
from engine.planning.group import PrefixGroup
from engine.planning.plan import Plan
from engine.planning.prefix_tree import PrefixTree
from engine.simulation.device import Device
from engine.simulation.simulation import SimulationSummary
from tasks.forecast.hardware import Hardware
from tasks.read import AnswerLength
from tasks.storage.artifact import runs_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Quantiles of whole numbers; each is one of the numbers. All are 0 if there are none."""

    low: int
    median: int
    high: int
    largest: int

    @classmethod
    def of(cls, values: npt.NDArray[np.integer[Any]]) -> "Quantiles":
        """The tenth, fiftieth and ninetieth percentile, and the largest."""
        if len(values) == 0:
            return cls(low=0, median=0, high=0, largest=0)
        low, median, high = np.quantile(values, (0.1, 0.5, 0.9), method="inverted_cdf").tolist()
        return cls(low=low, median=median, high=high, largest=int(values.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingShape:
    """A batch's prefix tree, and the groups that a plan makes of it.

    Attributes:
        num_tree_nodes: nodes of the tree where different prompts part, without the root.
        levels: of the distinct prompts: the number of such nodes on the path to each.
        num_groups: groups of the plan, those of a single prompt included.
        num_sharing_groups: groups with a prefix, each with `share_degree` distinct prompts and `prefix_tokens`.
    """

    num_tree_nodes: int
    levels: Quantiles
    num_groups: int
    num_sharing_groups: int
    share_degree: Quantiles
    prefix_tokens: Quantiles


def measure_shape(tree: PrefixTree, groups: Sequence[PrefixGroup]) -> SharingShape:
    """Measure the tree, and the groups of a plan of the same prompts."""
    node_levels = np.zeros(tree.num_nodes, dtype=np.int64)
    for node, parent in enumerate(tree.node_parents.tolist()[1:], start=1):
        node_levels[node] = node_levels[parent] + 1
    sharing = [group for group in groups if len(group.prefix)]
    return SharingShape(
        num_tree_nodes=tree.num_nodes - 1,
        levels=Quantiles.of(node_levels[tree.leaf_nodes]),
        num_groups=len(groups),
        num_sharing_groups=len(sharing),
        share_degree=Quantiles.of(np.array([len(group.members) for group in sharing], dtype=np.int64)),
        prefix_tokens=Quantiles.of(np.array([len(group.prefix) for group in sharing], dtype=np.int64)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingPolicy:
    """A way to share prefixes: the prompt tokens that it computes, and the token saving ratio (Eq. 2 of BatchLLM)."""

    name: str
    num_processed_tokens: int
    token_saving_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldOrder:
    """An order of the template's fields, `is_current` if it is the template's own, and the share of bytes that are then
    not computed again, 0 to 1 (Eq. 2 of BatchLLM, in bytes)."""

    fields: tuple[str, ...]
    saving_ratio: float
    is_current: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The simulation again with one setting changed, a command line option with its value. `time_ratio` is the
    predicted time with it, divided by that without, both on `num_partitions`: below 1 is faster."""

    option: str
    time_ratio: float
    num_partitions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMemory:
    """KV memory of the simulated device: the size of the block pool and the most that a step uses, in bytes.
    `bytes_per_token` maps a layer's attention window, 0 for none, to the KV bytes of a token in all such layers."""

    budget_bytes: int
    peak_bytes: int
    bytes_per_token: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A simulated run.

    Attributes:
        dtype: of weights and KV.
        num_oversized_rows: rows that do not fit into the KV budget even alone; they become error rows.
        num_oversized_tokens: of their prompts.
        num_engines: engines that run in parallel, each on such a device.
        seconds: until the last engine is done.
        run: steps, tokens and times, of all engines together.
        what_ifs: settings that were tried, the most helpful first.
    """

    device: Device
    dtype: str
    weight_bytes: int
    kv: KVMemory
    answer: AnswerLength
    num_oversized_rows: int
    num_oversized_tokens: int
    num_engines: int
    seconds: float
    run: SimulationSummary
    what_ifs: tuple[WhatIf, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPrefixes:
    """KV of shared prefixes that a later night over the same documents would read from disk; see `EngineConfig`.

    Attributes:
        num_tokens: of the prefixes that prompts of the plan share.
        num_bytes: of their KV.
        compute_seconds: to compute their linear layers on the device.
        read_seconds: to read them from the database's disk, at the rate measured now, and check their digests.
        budget_bytes: that `keep_prefixes` allows; 0: nothing is kept.
    """

    num_tokens: int
    num_bytes: int
    compute_seconds: float
    read_seconds: float
    budget_bytes: int

    @classmethod
    def measure(
        cls, rows: Plan, config: EngineConfig, hardware: Hardware, database: str | Path
    ) -> "KeptPrefixes | None":
        """Compare computing the shared prefixes of a plan with reading their KV from the database's disk. None if the
        rows share nothing, the engine cannot keep KV, or the disk cannot be measured.

        Args:
            rows, hardware: the plan, and the device whose rates give the time to compute.
            database: KV is kept beside it.
        """
        if config.sharing in ("lru", "none") or config.disaggregation != "none" or hardware.shape.kept_windows:
            return None
        shared = [len(group.prefix) for group in rows.groups() if len(group.prefix) >= config.block_size]
        num_tokens = sum(shared) - rows.num_common_block_tokens(config.block_size)
        if num_tokens <= 0:
            return None
        try:
            bytes_per_second = measure_read_rate(runs_folder(database))
        except OSError:
            return None
        num_bytes = num_tokens * hardware.shape.kv_bytes_per_token
        num_flops = 2 * hardware.shape.num_layer_weights * num_tokens
        return cls(
            num_tokens=num_tokens,
            num_bytes=num_bytes,
            compute_seconds=num_flops / hardware.device.flops_per_second(hardware.dtype),
            read_seconds=num_bytes / bytes_per_second,
            budget_bytes=config.keep_prefixes_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is known of one workload before its model is loaded.

    Attributes:
        label: always "simulated": the model computed none of these numbers.
        num_rows: rows to answer, those with an error included.
        num_already_done: rows that earlier runs have done; they are not planned.
        num_error_rows: of num_rows: rows that cannot be answered.
        num_duplicates: of num_rows: rows whose prompt equals another row's; it is computed once.
        num_prompt_tokens: of all rows without an error.
        policies: ways to share: none, an LRU cache of blocks (simulated), identical prompts once, the plans, and last
            the plan in partitions, as it runs.
        best_saving_ratio: the best that any sharing of prefixes could reach.
        field_orders: best first; empty if the template has one field or too many.
        prediction: None if there is nothing to run.
        kept_prefixes: what keeping KV on disk would bring; None if prompts share nothing.
        advice: sentences; empty if no change would help.
        seconds: that each stage of the explanation took.
    """

    workload: str
    mode: str
    model: str
    num_already_done: int
    label: str = "simulated"
    num_rows: int = 0
    num_error_rows: int = 0
    num_duplicates: int = 0
    num_prompt_tokens: int = 0
    num_partitions: int = 0
    shape: SharingShape | None = None
    policies: tuple[SharingPolicy, ...] = ()
    best_saving_ratio: float = 0.0
    field_orders: tuple[FieldOrder, ...] = ()
    prediction: Prediction | None = None
    kept_prefixes: KeptPrefixes | None = None
    advice: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
