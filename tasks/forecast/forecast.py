"""What `explain` says of a workload: counts of what is there, and a simulated run. Plain values, ready for JSON."""

from dataclasses import dataclass, field

from engine.simulation.device import Device
from engine.simulation.simulation_summary import SimulationSummary
from tasks.forecast.field_orders import FieldOrder
from tasks.forecast.sharing_shape import SharingShape
from tasks.read import AnswerLength


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
    """

    budget_bytes: int
    peak_bytes: int


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
    advice: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
