"""Corrects the forecast of a run with a deadline by the times that its partitions really take."""

import logging
import threading
from collections.abc import Sequence

from tasks.forecast.prediction import find_fitting
from tasks.runs.run import Run

LOGGER = logging.getLogger("batchloom")

LEAST_CHANGE = 0.05
"""Share of the rows by which a forecast must change to be logged again."""


class Pace:
    """The forecast of a run with a deadline, corrected by each partition that ends.

    The first partition of each engine includes loading the model, whose time may differ from its forecast. It counts
    only until another partition has ended.

    Args:
        title: of the run.
        order: in which partitions are begun.
        seconds: forecast of each partition, by its number.
        num_rows: of each partition, by its number.
        num_engines: engines that run in parallel.
        load_seconds: forecast for loading the model in each engine.
        begun: Unix time of the forecast.
        deadline: Unix time.

    Attributes:
        half_time_rows: rows done by the deadline, as forecast at half of the time; None before.
    """

    def __init__(
        self,
        *,
        title: str,
        order: Sequence[int],
        seconds: Sequence[float],
        num_rows: Sequence[int],
        num_engines: int,
        load_seconds: float = 0.0,
        begun: float,
        deadline: float,
    ) -> None:
        self._title, self._order, self._seconds, self._num_rows = title, list(order), seconds, num_rows
        self._num_engines, self._half_time, self._deadline = num_engines, (begun + deadline) / 2, deadline
        self._load_seconds, self._first = load_seconds, frozenset(self._order[:num_engines])
        self._running: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        self._num_done_rows = 0
        self._logged_rows: float | None = None
        self._lock = threading.Lock()
        self.half_time_rows: int | None = None

    def begin(self, partition: int, now: float) -> None:
        """Note that an engine takes a partition at this Unix time."""
        with self._lock:
            self._order.remove(partition)
            self._running[partition] = now

    def end(self, partition: int, now: float) -> None:
        """Note that a partition ends at this Unix time, and log the forecast if it has changed."""
        with self._lock:
            self._ended[partition] = max(0.0, now - self._running.pop(partition) - self._find_load(partition))
            self._num_done_rows += self._num_rows[partition]
            num_rows, total = self.forecast_rows(now), sum(self._num_rows)
            if now >= self._half_time and self.half_time_rows is None:
                self.half_time_rows = num_rows
            if self._logged_rows is None or abs(num_rows - self._logged_rows) > LEAST_CHANGE * total:
                self._logged_rows = num_rows
                LOGGER.info(
                    "%s: partitions take %.2f times what was forecast: %s of %s rows should be done by the deadline",
                    *(self._title, self.factor, f"{num_rows:,}", f"{total:,}"),
                )

    @property
    def factor(self) -> float:
        """Real seconds of ended partitions over their forecast; 1 before one has ended."""
        counted = list(self._ended)[self._num_engines :] or list(self._ended)
        forecast = sum(self._seconds[partition] for partition in counted)
        return sum(self._ended[partition] for partition in counted) / forecast if forecast > 0 else 1.0

    def forecast_rows(self, now: float) -> int:
        """Rows that will be done by the deadline, according to the corrected forecast."""
        factor, left, order = self.factor, max(0.0, self._deadline - now), [*self._running, *self._order]
        whole = [factor * self._seconds[partition] + self._find_load(partition) for partition in order]
        ahead = [
            max(0.0, seconds - (now - self._running.get(partition, now)))
            for partition, seconds in zip(order, whole, strict=True)
        ]
        num_rows = self._num_done_rows
        for place, share in find_fitting(range(len(order)), ahead, self._num_engines, left).items():
            done = 1 - (1 - share) * ahead[place] / whole[place] if share < 1 else 1.0
            num_rows += int(done * self._num_rows[order[place]])
        return num_rows

    def _find_load(self, partition: int) -> float:
        return self._load_seconds if partition in self._first else 0.0

    def note(self, run: Run, share: float = 1.0) -> None:
        """Keep the corrected forecast in the run's record, for its report; `share` is the run's share of all rows."""
        if self._ended:
            prediction = dict(run.record.config["prediction"]) | {"pace": self.factor}
            if self.half_time_rows is not None:
                prediction["half_time_rows"] = self.half_time_rows * share
            run.note(config={**run.record.config, "prediction": prediction})
