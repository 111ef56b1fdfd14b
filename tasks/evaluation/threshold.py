"""Thresholds for metrics, such as ``accuracy=0.9``, ``topic.accuracy=0.9`` or ``topic.recall.billing=0.8``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import ConfigError
from tasks.evaluation.evaluation import GOLD, Metric

ROUNDING = 1e-9
"""A mean of equal values may be so far from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A bound for a metric.

    Attributes:
        column_name: of the answers; empty for each column that has the metric.
        label: of the metric; empty for the column as a whole.
        bound, is_least: the least allowed value, or the largest.
    """

    metric: str
    column_name: str = ""
    label: str = ""
    bound: float
    is_least: bool

    @classmethod
    def parse(cls, text: str, *, is_least: bool) -> "Threshold":
        """Parse ``[COLUMN.]METRIC[.LABEL]=VALUE``; a label needs its column. `ConfigError` for any other form."""
        name, _, value = text.rpartition("=")
        parts = name.split(".", 2)
        try:
            bound = float(value)
        except ValueError:
            bound = math.nan
        if math.isnan(bound) or not all(parts):
            flag = "--min" if is_least else "--max"
            raise ConfigError(f"{flag} {text!r} is not of the form [COLUMN.]METRIC[.LABEL]=NUMBER")
        column_name, metric, label = {1: ("", *parts, ""), 2: (*parts, "")}.get(len(parts), tuple(parts))
        return cls(metric=metric, column_name=column_name, label=label, bound=bound, is_least=is_least)

    def find_failures(self, metrics: Sequence[Metric]) -> list[str]:
        """Descriptions of the metrics that miss the bound. Beside gold, only the agreement of two runs counts, none of
        their other metrics. Raises `ConfigError` if no metric has the name."""
        has_gold = any(each.reference == GOLD for each in metrics)
        judged = [each for each in metrics if not has_gold or each.reference == GOLD or each.metric == "agreement"]
        found = [each for each in judged if self._names(each)]
        if not found:
            named = [(each.column_name, each.metric, each.label or "") for each in judged]
            known = sorted({".".join(filter(None, names)) for names in named if bool(names[2]) == bool(self.label)})
            name = ".".join(filter(None, (self.column_name, self.metric, self.label)))
            raise ConfigError(f"no metric {name!r} was computed; there are {', '.join(known)}")
        sign = 1 if self.is_least else -1
        missed = [each for each in found if sign * (self.bound - each.value) > ROUNDING]
        labels = ["" if each.label is None else f" of {each.label!r}" for each in missed]
        side = f"{'below' if self.is_least else 'above'} {self.bound:g}"
        return [
            f"{each.metric}{label} in {each.column_name} is {each.value:.6g}, {side}"
            for each, label in zip(missed, labels, strict=True)
        ]

    def _names(self, each: Metric) -> bool:
        is_named = (each.metric, each.label or "") == (self.metric, self.label)
        return is_named and self.column_name.lower() in ("", each.column_name.lower())
