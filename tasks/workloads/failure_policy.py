"""When a run tries again, and when it gives up."""

from collections import Counter
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from engine.errors import FailureRateError

NUM_REASONS = 3
"""Of the reasons for failed rows, how many a message names."""


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class FailurePolicy:
    """When the run tries again, and when it gives up.

    Rows that could not be tried, because the input is not usable, do not count as failed.
    """

    retries: Annotated[
        int, Field(ge=0, description="of a partition, before it is split until the rows that fail are found")
    ] = 2
    retry_delay_seconds: Annotated[
        float, Field(ge=0, description="before the first retry; each further one waits twice as long")
    ] = 1.0
    max_error_rate: Annotated[
        float, Field(ge=0, le=1, description="the run fails where a larger share of the rows it tried does")
    ] = 0.5
    error_rate_rows: Annotated[int, Field(ge=1, description="fewest rows that say something about that share")] = 20

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
