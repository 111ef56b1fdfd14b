"""What `explain` says of a night file, as plain values for JSON."""

from collections.abc import Mapping
from dataclasses import dataclass

from tasks.forecast.forecast import Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchForecast:
    """One workload of a night, or several that are planned together.

    Attributes:
        model: its name in the night file.
        workloads: each as if it ran alone.
        num_planned_tokens: prompt tokens that the plan of all of them computes.
        load_seconds: to load the model; 0 if it is loaded already or no row needs it, None if the device is not here.
        seconds: of the steps, until the last engine is done.
    """

    model: str
    workloads: tuple[Forecast, ...]
    num_planned_tokens: int
    load_seconds: float | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NightForecast:
    """A night, as far as it is known before it begins.

    Attributes:
        title: the night file's name.
        batches: in the order in which the night answers them.
        unknown: why other steps are not simulated, by name.
        seconds: of all batches, with the loading of models where that is known.
        seconds_allowed: until the night's deadline, if it began now; None for no deadline.
    """

    title: str
    batches: tuple[BatchForecast, ...]
    unknown: Mapping[str, str]
    seconds: float
    seconds_allowed: float | None

    @property
    def forecasts(self) -> list[Forecast]:
        """Of all workloads, each as if it ran alone."""
        return [forecast for batch in self.batches for forecast in batch.workloads]
