"""Corrects the forecast of a run with a deadline by the times that its partitions really take."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from tasks.forecast.prediction import find_fitting
from tasks.runs.run import Run

LOGGER = logging.getLogger("batchloom")

LEAST_CHANGE = 0.05
"""Share of the prompts by which a forecast must change to be logged again."""


@dataclass(kw_only=True, eq=False)
class Pace:
    """The forecast of a run with a deadline, corrected by each partition that ends. The first partition of each engine
    includes loading the model, whose time may differ from its forecast. It counts only until another one has ended.

    Attributes:
        order: in which partitions are begun.
        seconds, num_rows: forecast and prompts of each partition, by its number.
        load_seconds: forecast for loading the model in each engine.
        begun, deadline: Unix times of the forecast and the end.
        half_time_rows: prompts done by the deadline, as forecast at half of the time; None before.
    """

    title: str
    order: Sequence[int]
    seconds: Sequence[float]
    num_rows: Sequence[int]
    num_engines: int
    load_seconds: float = 0.0
    begun: float
    deadline: float
    half_time_rows: int | None = None
    _running: dict[int, float] = field(default_factory=dict, init=False)
    _ended: dict[int, float] = field(default_factory=dict, init=False)
    _logged_rows: int = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self._logged_rows = self.forecast_rows(self.begun)

    def begin(self, partition: int, now: float) -> None:
        """Note that an engine takes a partition at this Unix time."""
        with self._lock:
            self._running[partition] = now

    def end(self, partition: int, now: float) -> None:
        """Note that a partition ends at this Unix time, and log the forecast if it has changed."""
        with self._lock:
            self._ended[partition] = max(0.0, now - self._running.pop(partition) - self._find_load(partition))
            num_rows, total = self.forecast_rows(now), sum(self.num_rows)
            if now >= (self.begun + self.deadline) / 2 and self.half_time_rows is None:
                self.half_time_rows = num_rows
            if abs(num_rows - self._logged_rows) > LEAST_CHANGE * total:
                self._logged_rows = num_rows
                LOGGER.info(
                    "%s: partitions take %.2f times what was forecast: %s of %s prompts should be done by the deadline",
                    *(self.title, self.factor, f"{num_rows:,}", f"{total:,}"),
                )

    @property
    def factor(self) -> float:
        """Real seconds of ended partitions over their forecast; 1 before one has ended, and while none took longer than
        loading the model was forecast to take."""
        counted = list(self._ended)[self.num_engines :] or list(self._ended)
        forecast = sum(self.seconds[partition] for partition in counted)
        seconds = sum(self._ended[partition] for partition in counted)
        return seconds / forecast if seconds > 0 and forecast > 0 else 1.0

    def forecast_rows(self, now: float) -> int:
        """Prompts that will be done by the deadline, according to the corrected forecast."""
        begun = {*self._running, *self._ended}
        order = [*self._running, *(partition for partition in self.order if partition not in begun)]
        factor, left = self.factor, max(0.0, self.deadline - now)
        whole = [factor * self.seconds[partition] + self._find_load(partition) for partition in order]
        ahead = [
            max(0.0, seconds - (now - self._running.get(partition, now)))
            for partition, seconds in zip(order, whole, strict=True)
        ]
        num_rows = sum(self.num_rows[partition] for partition in self._ended)
        for place, share in find_fitting(range(len(order)), ahead, self.num_engines, left).items():
            done = 1 - (1 - share) * ahead[place] / whole[place] if share < 1 else 1.0
            num_rows += int(done * self.num_rows[order[place]])
        return num_rows

    def _find_load(self, partition: int) -> float:
        return self.load_seconds if partition in self.order[: self.num_engines] else 0.0

    def note(self, run: Run) -> None:
        """Keep the corrected forecast in the run's record, for its report, in rows of the run."""
        if self._ended:
            prediction = dict(run.record.config["prediction"]) | {"pace": self.factor}
            if self.half_time_rows is not None:
                share = self.half_time_rows / sum(self.num_rows)
                prediction["half_time_rows"] = share * run.artifacts["requests"].num_rows
            run.note(config={**run.record.config, "prediction": prediction})
