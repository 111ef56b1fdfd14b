"""Infers the partitions of a plan on the engine of this process, several engines of this host, or a Ray cluster."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prefect import unmapped
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.futures import PrefectFutureList
from prefect.task_runners import ThreadPoolTaskRunner

from engine.config import EngineConfig
from flows.settings import WorkerSettings
from tasks.infer import infer
from tasks.partitions.engine_host import PROCESS_HOST
from tasks.runs.infer_job import FailurePolicy, InferJob, JobMember
from tasks.runs.progress import PlannedWork, watch_progress
from tasks.runs.run_summary import artifact_key
from tasks.runs.source import Source
from tasks.storage.artifact import ArtifactRef
from tasks.workers.engine_team import EngineTeam, lay_out_workers

if TYPE_CHECKING:
    from flows.ray_cluster import RayCluster
    from tasks.nights.pace import Pace
    from tasks.workers.worker_pool import WorkerPool

LOGGER = logging.getLogger("batchloom")

Futures = PrefectFutureList[Any]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """What all workloads of a night share: the source of rows, the engines, and when a run fails. No step of the engine
    begins after `deadline` (Unix time; None for none). For `keeps_base` see `Engine.load`."""

    source: Source
    engine: EngineConfig
    failures: FailurePolicy
    workers: Workers
    deadline: float | None = None
    keeps_base: bool = False

    @property
    def num_engines(self) -> int:
        """How many compute side by side. See `Workers.team`, which imports torch and joins a Ray cluster."""
        return self.workers.team(self.engine).num_engines

    def make_job(self, plan: ArtifactRef, *members: JobMember) -> InferJob:
        """What each worker needs to infer partitions of the plan. See `InferJob`."""
        source, url = self.source, self.workers.settings.exchange
        local_model = Path(source.model).expanduser()
        return InferJob(
            members=members,
            plan=plan,
            checkpoint=str(source.checkpoint),
            model_digest=source.model_digest,
            engine=self.engine,
            failures=self.failures,
            exchange=f"{url.rstrip('/')}/{members[0].run_folder.name}" if url else "",
            model=str(local_model.absolute()) if local_model.exists() else source.model,
            deadline=self.deadline,
            keeps_base=self.keeps_base,
        )


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
