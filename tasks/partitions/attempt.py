"""Rows given to the model once: what it answered is kept, and what it failed with is told apart."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.device.placement import give_back_freed_memory
from engine.errors import BatchloomError
from engine.execution.step_record import StepRecord
from engine.planning.plan import Plan
from engine.request import Completion
from tasks.partitions.engine_host import PROCESS_HOST, LoadedModel
from tasks.partitions.joint import ask_jointly
from tasks.partitions.partition_work import PartitionWork
from tasks.prompts.prompt import RequestForm
from tasks.runs.infer_job import InferJob
from tasks.runs.lowered_engines import note_lowered
from tasks.workloads.workload import Workload

KEEP_SECONDS = 30.0
"""Between two times that answers are kept. Freed memory is given back then, too: steps differ in size, so the C
library's heap comes to be full of holes. Both take some milliseconds."""


class StoppedError(Exception):
    """The run was asked to stop; raised from inside a step of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What an attempt ended with, in a line."""

    reason: str
    is_out_of_memory: bool = False


ENDED = Failure(reason="the process that tried it ended each time")


def try_rows(rows: Plan, job: InferJob, work: PartitionWork, on_begin: Callable[[], None]) -> Failure | None:
    """One attempt. However it ends, the answers it came to are in `work`, and so are its steps; most of them already
    while it lasts.

    Args:
        on_begin: called when the model is loaded.

    Returns:
        what the model failed with; None where every row has an answer.
    Raises:
        StoppedError: the run was asked to stop.
        BatchloomError, OSError: a failure that is nobody's row: of the model as a whole, a file, the device.
    """
    stop = job.stop
    steps: list[StepRecord] = []
    completions: list[Completion] = []
    kept_at = time.monotonic()

    def keep() -> None:
        work.keep(completions, rows, model.codec, steps)
        completions.clear()
        steps.clear()

    def on_step(step: StepRecord) -> None:
        nonlocal kept_at
        steps.append(step)
        work.progress.add(step)
        if not stop.has_time(step.duration_ms / 1e3 if step.step else 0.0):  # an engine warms up in its first step
            raise StoppedError
        if time.monotonic() - kept_at > KEEP_SECONDS:
            keep()
            give_back_freed_memory()
            kept_at = time.monotonic()

    with PROCESS_HOST.use(job) as model:
        if model.engine.config != job.engine:
            note_lowered(job.run_folder, model.engine.config)
        if stop.is_made:  # loading may have taken the rest of the time
            raise StoppedError
        on_begin()
        try:
            for completion in run_model(rows, job, model, on_step):
                completions.append(completion)
        except (StoppedError, BatchloomError, OSError):
            raise
        except Exception as error:
            from tasks.partitions.failing import judge_failure  # most attempts come through

            return judge_failure(error)
        finally:
            keep()
    return None


def run_model(
    rows: Plan, job: InferJob, model: LoadedModel, on_step: Callable[[StepRecord], None]
) -> Iterator[Completion]:
    """The model's answers as they come. See `Engine.run_plan`."""
    if job.members:
        requests = ask_jointly(rows, job, lambda workload, length: _make_form(workload, length, model))
    else:
        requests = _make_form(job.workload, job.expected_output_tokens, model).ask(rows)
    yield from model.engine.run_plan(requests, rows.groups(), decode=model.codec.decode, on_step=on_step)


def _make_form(workload: Workload, expected_output_tokens: int | None, model: LoadedModel) -> RequestForm:
    """How a workload's rows are asked of this model."""
    form = RequestForm.of(workload, model.codec, expected_output_tokens)
    if any("grammar" in each or "thinking" in each for each in form.settings):
        from tasks.partitions.constraints import compile_constraints  # most workloads have none

        form = compile_constraints(form, model)
    return form
