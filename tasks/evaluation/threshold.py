"""What is asked of metrics: ``accuracy=0.9``, ``topic.accuracy=0.9``, ``topic.recall.billing=0.8``."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.errors import ConfigError
from tasks.evaluation.evaluation import GOLD, Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A bound for a metric.

    Attributes:
        metric: its name.
        column_name: of the answers; empty for each column that has the metric.
        label: whose metric; empty for that of a column as a whole.
        bound: the least or the largest value that will do.
        is_least: whether it is the least.
    """

    metric: str
    column_name: str = ""
    label: str = ""
    bound: float
    is_least: bool

    @classmethod
    def parse(cls, text: str, *, is_least: bool) -> "Threshold":
        """``[COLUMN.]METRIC[.LABEL]=VALUE``; a label needs its column.

        Raises:
            ConfigError: it is not of this form.
        """
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
        """The metrics that miss the bound, each in words; raises `ConfigError` where none has the name."""
        found = [each for each in metrics if self._names(each)]
        if not found:
            known = sorted({each.metric for each in metrics})
            name = ".".join(filter(None, (self.column_name, self.metric, self.label)))
            raise ConfigError(f"no metric {name!r} was computed; there are {', '.join(known)}")
        return [
            f"{describe(each)} is {each.value:.4g}, {'below' if self.is_least else 'above'} {self.bound:g}"
            for each in found
            if (each.value < self.bound if self.is_least else each.value > self.bound)
        ]

    def _names(self, each: Metric) -> bool:
        """A metric of agreement has no gold; of other names those against gold count."""
        is_right_reference = each.reference == GOLD or each.metric == "agreement"
        return (
            is_right_reference
            and each.metric == self.metric
            and self.column_name in ("", each.column_name)
            and (each.label or "") == self.label
        )


def describe(each: Metric) -> str:
    """``recall of 'billing' in topic``."""
    label = "" if each.label is None else f" of {each.label!r}"
    return f"{each.metric}{label} in {each.column_name}"


def find_failures(thresholds: Iterable[Threshold], metrics: Sequence[Metric]) -> list[str]:
    """Of all thresholds; raises what `Threshold.find_failures` raises."""
    return [failure for threshold in thresholds for failure in threshold.find_failures(metrics)]
