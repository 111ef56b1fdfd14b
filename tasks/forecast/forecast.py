"""What `explain` says of a workload: counts of what is there, and a simulated run. Plain values, ready for JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.planning.plan import PrefixGroup
from engine.planning.prefix_tree import PrefixTree
from engine.simulation.device import Device
from engine.simulation.simulation import SimulationSummary
from tasks.forecast.field_orders import FieldOrder
from tasks.read import AnswerLength


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Of whole numbers; each is one of them. All 0 where there are none."""

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
        num_tree_nodes: beginnings that at least two different prompts have and then leave, the empty one not counted.
        levels: of the distinct prompts: how many such beginnings lie on the way to each.
        num_groups: of the plan, those of a single prompt included.
        num_sharing_groups: with a prefix, which two or more prompts share.
        share_degree: of these groups: distinct prompts.
        prefix_tokens: of these groups: tokens in the prefix.
    """

    num_tree_nodes: int
    levels: Quantiles
    num_groups: int
    num_sharing_groups: int
    share_degree: Quantiles
    prefix_tokens: Quantiles


def measure_shape(tree: PrefixTree, groups: Sequence[PrefixGroup]) -> SharingShape:
    """Counts both; the groups are a plan of the tree's prompts."""
    node_levels = np.zeros(tree.num_nodes, dtype=np.int64)
    for node, parent in enumerate(tree.node_parents.tolist()):
        if node:
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
    """One way to share beginnings.

    Attributes:
        num_processed_tokens: prompt tokens it computes.
        token_saving_ratio: Eq. 2 of BatchLLM, 0 to 1.
    """

    name: str
    num_processed_tokens: int
    token_saving_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The simulation again with one setting changed.

    Attributes:
        option: of the command line, with its value.
        time_ratio: predicted time with it against without it; below 1 is faster.
        num_partitions: on which both were simulated.
    """

    option: str
    time_ratio: float
    num_partitions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMemory:
    """KV memory of the simulated device.

    Attributes:
        budget_bytes: what the block pool holds.
        peak_bytes: the most that one step holds.
        bytes_per_token: positions that a layer's rows see, 0 for all, to the KV of a token in all such layers.
    """

    budget_bytes: int
    peak_bytes: int
    bytes_per_token: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A simulated run.

    Attributes:
        device: whose rates the times are computed from.
        dtype: of weights and KV.
        weight_bytes: that the model takes on the device.
        num_oversized_rows: that the KV budget cannot hold even alone; they become errors.
        num_engines: that work side by side, each on such a device.
        seconds: until the last of them is done.
        run: steps, tokens and times, of all engines together.
        what_ifs: settings tried; the most helpful one first.
    """

    device: Device
    dtype: str
    weight_bytes: int
    kv: KVMemory
    answer: AnswerLength
    num_oversized_rows: int
    num_engines: int
    seconds: float
    run: SimulationSummary
    what_ifs: tuple[WhatIf, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPrefixes:
    """What a later night over the same documents would read instead of computing it; see `EngineConfig`.

    Attributes:
        num_tokens: of the beginnings that prompts of the plan share.
        num_bytes: of their KV.
        compute_seconds: for their linear layers on the device.
        read_seconds: from the database's disk, as fast as it was now, their digest checked.
        budget_bytes: that `keep_prefixes` allows; 0: nothing is kept.
    """

    num_tokens: int
    num_bytes: int
    compute_seconds: float
    read_seconds: float
    budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is known of one workload before its model is loaded.

    Attributes:
        label: always "simulated": nothing in here was computed by the model.
        num_rows: to be answered, those with an error included.
        num_already_done: rows that earlier runs answered; they are not planned.
        num_error_rows: of num_rows: known not to be answerable.
        num_duplicates: of num_rows: prompts that equal another row's, which is computed instead.
        num_prompt_tokens: of all rows without an error.
        policies: no sharing, what a cache of blocks finds by itself (simulated), and from identical prompts to what the
            engine does; as planned in partitions is the last.
        best_saving_ratio: what no sharing of beginnings could exceed.
        field_orders: best first; empty where the template has a single field or too many.
        prediction: None where there is nothing to run.
        kept_prefixes: what keeping KV on disk would bring; None where prompts share nothing.
        advice: what would help, in sentences; empty where nothing found would.
        seconds: that explaining took, by stage.
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
