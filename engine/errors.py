"""The one exception tree: every error batchloom raises on purpose derives from `BatchloomError`.

Each class also inherits the builtin that a caller would expect, so `except ValueError` keeps working. A model that
computes NaN is a `FloatingPointError` outside the tree, treated as what a model itself raises: some rows are the cause.
Messages name the actual value, the expected one, and which request, row, file or column is meant.
"""

from collections.abc import Mapping, Sequence

COMPUTED_NAN = "the model computed NaN, as float16 does beyond 65,504: set dtype to auto"
"""The message of such a `FloatingPointError`."""


class BatchloomError(Exception):
    """Base of every deliberate error."""


class ConfigError(BatchloomError, ValueError):
    """A setting is unknown, out of range, or does not fit another setting."""


class RequestError(BatchloomError, ValueError):
    """A request cannot be served as asked; the message names its request_id."""


class GrammarError(BatchloomError, ValueError):
    """A grammar is not valid, or allows no answer."""


class UnknownParameterError(RequestError, TypeError):
    """A request carries a parameter that does not exist."""


class ModelError(BatchloomError, ValueError):
    """A checkpoint cannot be read, or its architecture cannot be computed exactly."""


class CapacityError(BatchloomError, MemoryError):
    """The memory budget is too small for what has to be resident at once."""


class OutOfMemoryError(CapacityError):
    """The device or the host has less free memory than is asked for; a smaller budget may fit."""


class ArtifactError(BatchloomError, OSError):
    """A file between two tasks is missing, damaged, or not what its reference says."""


class UnreadableError(ArtifactError):
    """A file cannot be read now, as where a network folder or a disk fails; it may be whole."""


class DatabaseError(BatchloomError, OSError):
    """A database cannot be opened, or lacks a table or a column that a workload reads."""


class WorkloadError(BatchloomError, ValueError):
    """A workload definition is incomplete or contradicts itself."""


class DeviceError(BatchloomError, RuntimeError):
    """The device has failed; it is unusable until this process has ended."""


class BusyError(BatchloomError, RuntimeError):
    """An engine is asked while it answers another call, or has been asked again before it had answered this one."""


class PrefillWorkerError(BatchloomError, RuntimeError):
    """The process that computes prompts for this one has failed or is gone."""


class WorkerError(BatchloomError, RuntimeError):
    """Worker processes end one after the other, or fail without a reason."""


class FailureRateError(BatchloomError, RuntimeError):
    """So many rows fail, or are invalid, that the cause is probably not in the rows."""


class QualityError(BatchloomError, RuntimeError):
    """A metric of the answers misses its required value."""


class NightError(BatchloomError, RuntimeError):
    """Workloads of a night failed; the others are answered. `steps` tells for JSON how each step ended."""

    def __init__(self, message: str, steps: Sequence[Mapping[str, object]] = ()) -> None:
        super().__init__(message)
        self.steps = steps
