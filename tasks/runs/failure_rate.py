"""Too many rows that failed or are invalid: how many, and why."""

from collections import Counter

from engine.errors import FailureRateError
from tasks.database.connection import execute
from tasks.database.opening import open_in_memory
from tasks.runs.infer_job import FailurePolicy
from tasks.storage.artifact import ArtifactRef
from tasks.workloads.workload import Workload

NUM_REASONS = 3
"""Most reasons that a message names."""


def check_input(policy: FailurePolicy, workload: Workload, tokens: ArtifactRef, num_rows: int) -> None:
    """Raise `FailureRateError` if the policy does not allow so many invalid rows.

    Args:
        tokens: prompts of the workload's rows that are not done; a row without one is invalid.
        num_rows: of the workload, done or not.
    """
    limit = policy.max_invalid_rate
    if limit < 1 and num_rows >= policy.error_rate_rows:
        reasons = count_invalid(workload, tokens)
        if reasons.total() > limit * num_rows:
            raise rate_error("are invalid", "max_invalid_rate", limit, reasons, num_rows)


def count_invalid(workload: Workload, tokens: ArtifactRef) -> Counter[str]:
    """The number of a workload's rows without a prompt, by reason; numbers and quoted texts in reasons are left out. A
    row that makes several requests counts if one of them has no prompt."""
    parameters = {"tokens": tokens.path, "num_questions": len(workload.kind.suffixes)}
    with open_in_memory(tokens.path) as connection:
        return Counter(dict(execute(connection, "read/invalid_reasons", parameters).fetchall()))


def rate_error(what: str, setting: str, limit: float, reasons: Counter[str], num_rows: int) -> FailureRateError:
    """The error that says how many rows are too many, and the commonest reasons.

    Args:
        what: they did or are.
        setting, limit: the share that is allowed.
        reasons: to their number of rows.
        num_rows: of which these are a share.
    """
    common = "; ".join(f"{reason} ({count:,} rows)" for reason, count in reasons.most_common(NUM_REASONS))
    rest = len(reasons) - NUM_REASONS
    others = f"; and {rest:,} other reasons" if rest > 0 else ""
    share = f"{reasons.total():,} of {num_rows:,} rows {what}, {setting} allows {100 * limit:g}%"
    return FailureRateError(f"{share}: {common}{others}")
