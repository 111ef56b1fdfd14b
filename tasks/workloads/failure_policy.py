"""When a run tries again, and when it gives up."""

from collections import Counter
from dataclasses import dataclass

from engine.errors import FailureRateError

NUM_REASONS = 3
"""Of the reasons for failed rows, how many a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """What a run does about rows that the model fails on.

    Attributes:
        retries: of a partition as a whole, before it is split until the rows that fail are found.
        retry_delay_seconds: before the first of them; each further one waits twice as long.
        max_error_rate: the run fails where a larger share of its rows does, 0 to 1. Rows that could not be tried,
            because the input is not usable, do not count.
        error_rate_rows: the fewest rows that say something about that share.
    """

    retries: int = 2
    retry_delay_seconds: float = 1.0
    max_error_rate: float = 0.5
    error_rate_rows: int = 20

    def delay_seconds(self, num_failures: int) -> float:
        """How long to wait after so many failures of the same rows, from 1 on."""
        return float(self.retry_delay_seconds * 2 ** (num_failures - 1))

    def check(self, reasons: Counter[str], num_rows: int) -> None:
        """Raise `FailureRateError` where too many of `num_rows` failed; `reasons` holds each failed row's."""
        num_failed = reasons.total()
        if num_rows < self.error_rate_rows or num_failed <= self.max_error_rate * num_rows:
            return
        common = "; ".join(f"{reason} ({count:,} rows)" for reason, count in reasons.most_common(NUM_REASONS))
        rest = len(reasons) - NUM_REASONS
        raise FailureRateError(
            f"{num_failed:,} of {num_rows:,} rows failed, max_error_rate allows {self.max_error_rate:.0%}: {common}"
            + (f"; and {rest:,} other reasons" if rest > 0 else "")
        )
