"""Infers the partitions of a plan on the engine of this process, several engines of this host, or a Ray cluster."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from prefect import unmapped
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.futures import PrefectFutureList
from prefect.task_runners import ThreadPoolTaskRunner

from engine.config import EngineConfig
from flows.settings import WorkerSettings
from tasks.infer import infer
from tasks.partitions.engine_host import PROCESS_HOST
from tasks.runs.infer_job import InferJob
from tasks.runs.progress import PlannedWork, watch_progress
from tasks.runs.run import Run
from tasks.runs.run_summary import artifact_key
from tasks.storage.artifact import ArtifactRef
from tasks.storage.plan_file import PlanSummary
from tasks.workers.engine_team import EngineTeam, lay_out_workers

if TYPE_CHECKING:
    from flows.ray_cluster import RayCluster
    from flows.workload_run import Night
    from tasks.nights.pace import Pace
    from tasks.workers.worker_pool import WorkerPool

LOGGER = logging.getLogger("batchloom")

Futures = PrefectFutureList[Any]

FEWEST_TOKENS_TO_PREDICT = 50_000
"""Prompt tokens to compute below which a plan is not predicted: computing them is faster than measuring the device."""


class Workers:
    """The engines of a night. They call `make_room`, load the model at the first partition, and keep it until `close`.
    With `is_isolated` each runs in a process of its own, since a row may crash one; see `isolation_mark`."""

    def __init__(
        self, settings: WorkerSettings, is_isolated: bool = False, make_room: Callable[[], None] | None = None
    ) -> None:
        self.settings = settings
        self._is_isolated = is_isolated
        self._make_room = make_room
        self.are_loaded = False
        self._pool: WorkerPool | None = None
        self._cluster: RayCluster | None = None
        if settings.runner == "ray":
            from flows import ray_cluster  # imported only when needed

            self._cluster = ray_cluster.RayCluster(settings.ray_address)

    def infer_partitions(
        self, job: InferJob, dispatch_order: Sequence[int], work: PlannedWork, pace: "Pace | None" = None
    ) -> list[ArtifactRef]:
        """Map `infer` over the partitions, each on the next free engine; returns the parts of all partitions. Raises
        the error of the first partition that failed, or `KeyboardInterrupt` after a stop request. Finished parts stay.

        Args:
            dispatch_order: order in which several engines take the partitions.
            work: what the progress bar counts.
            pace: corrects and logs the forecast of a run with a deadline; `StopRequest` ends the run.
        """
        if not self.are_loaded and self._make_room is not None:
            self._make_room()
        self.are_loaded = True
        show = start_bar(job.title, work.num_rows)
        exchange = None
        if job.exchange:
            from tasks.runs.run_exchange import RunExchange

            exchange = RunExchange(job.first.run_folder, job.exchange)
            exchange.offer(job.plan)
        cluster = self._cluster
        submitted = cluster.submit(job, dispatch_order) if cluster else self._submit(job, dispatch_order, pace)
        with (
            watch_progress(job.first.run_folder, job.title, work, show=show),
            exchange.taking() if exchange is not None else nullcontext(),
            submitted as futures,
        ):
            found = futures.result()
            if None in found or (len(found) < len(dispatch_order) and not job.stop.is_overdue):
                raise KeyboardInterrupt
        parts = list(chain.from_iterable(cast("list[list[ArtifactRef]]", found)))  # Prefect types it as futures
        return exchange.find(parts) if exchange is not None else parts

    def team(self, engine: EngineConfig) -> EngineTeam:
        """The engines that compute side by side; joins the Ray cluster, if there is one. Raises as `lay_out_workers`,
        `RayCluster.team`."""
        if self._cluster is not None:
            return self._cluster.team(engine)
        if self.settings.workers == 1 or (self.settings.workers == "auto" and engine.device == "cpu"):
            return EngineTeam(engine=engine)
        return lay_out_workers(self.settings.workers, engine)

    def close(self) -> None:
        """End the engine processes, leave the cluster, free the model; the next partition loads it again."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._cluster is not None:
            self._cluster.leave()
        self.are_loaded = False
        PROCESS_HOST.release()

    @contextmanager
    def _submit(self, job: InferJob, dispatch_order: Sequence[int], pace: "Pace | None") -> Iterator[Futures]:
        """One task per partition: on the engine of this process, by partition number, or on one process per engine."""
        team = self.team(job.engine)
        has_pool = self._is_isolated or bool(job.exchange) or team.num_engines > 1
        if self._pool is None and has_pool:
            from tasks.workers.worker_pool import WorkerPool  # imported only when needed

            self._pool = WorkerPool(team.environments)
        given: dict[str, Any] = {"job": replace(job, engine=team.engine)}
        if self._pool is not None:
            given["answer"] = self._pool.answer
        runner: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=team.num_engines)
        with runner as threads, job.stop.make_on_error():
            if job.deadline is not None:
                from flows.in_time import submit_in_time  # imported only when needed

                yield submit_in_time(threads, dispatch_order, given, team.num_engines, pace)
            else:
                same = {name: unmapped(value) for name, value in given.items()}
                order = sorted(dispatch_order) if self._pool is None else dispatch_order
                yield threads.map(infer, {"partition": order, **same})


def infer_plan(
    night: "Night", job: InferJob, summary: PlanSummary, runs: Sequence[Run], num_answer_tokens: float
) -> list[ArtifactRef] | None:
    """Predict a long plan, then infer its partitions; returns their parts, or None if the model cannot load in time.

    Args:
        job, summary: what all partitions have in common, and their plan in numbers.
        runs: those with rows in the plan.
        num_answer_tokens: expected length of an answer.
    """
    load_seconds, pace = 0.0, None
    if night.deadline is not None:
        from flows.in_time import find_load_seconds  # imported only when needed

        if (found := find_load_seconds(night, night.deadline, job.title)) is None:
            return None
        load_seconds = found
    is_short = night.deadline is None and summary.sharing.num_processed_tokens < FEWEST_TOKENS_TO_PREDICT
    if summary.num_rows and not is_short and night.source.method != "none":
        from flows.prediction import predict_night  # imported only when needed

        pace = predict_night(night, runs, job, summary, load_seconds)
    work = PlannedWork(
        num_rows=summary.num_rows,
        num_prompt_tokens=summary.sharing.num_processed_tokens,
        answer_tokens=num_answer_tokens - 1,  # decode steps: prefill gives the first token
    )
    with measure_all(runs, "infer"):
        parts = night.workers.infer_partitions(job, summary.dispatch_order, work, pace)
    if pace is not None:
        for run in runs:
            pace.note(run)
    return parts


def measure_all(runs: Iterable[Run], stage: str) -> ExitStack:
    """`Run.measure` of all runs at once."""
    stack = ExitStack()
    for run in runs:
        stack.enter_context(run.measure(stage))
    return stack


def start_bar(workload: str, num_rows: int) -> Callable[[int], None]:
    """Create a progress bar at 0%; returns a function that shows a number of rows. Its errors are only logged.

    After a failed update the bar stays as it is: Prefect retries each update for a minute, and the run would wait.
    """
    key, description = artifact_key("progress", workload), f"{workload}: {num_rows:,} prompts to answer"
    artifact: Any = None
    try:
        artifact = create_progress_artifact(0.0, key=key, description=description)
    except Exception as error:  # such as a server that does not answer for a moment
        LOGGER.warning("%s: no progress bar: %s", workload, error)

    def show(num_done: int) -> None:
        nonlocal artifact
        if artifact is None:
            return
        try:
            update_progress_artifact(artifact, progress=100.0 * num_done / num_rows if num_done < num_rows else 100.0)
        except Exception as error:
            artifact = None
            LOGGER.warning("%s: the progress bar is not updated any more: %s", workload, error)

    return show
