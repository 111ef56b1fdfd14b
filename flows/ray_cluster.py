"""The workers of a Ray cluster, one GPU each; `prefect-ray` runs partitions on them."""

import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect.client.orchestration import get_client
from prefect.futures import PrefectFutureList, wait
from prefect.settings import PREFECT_API_URL, temporary_settings

from engine.config import Dtype, EngineConfig
from engine.errors import ConfigError
from engine.kernels import cdiv
from engine.limits import check_kv_budget
from tasks.runs.infer_job import InferJob
from tasks.runs.run_exchange import LATE
from tasks.workers.engine_team import EngineTeam
from tasks.workers.infer_remote import infer_on_ray

if TYPE_CHECKING:
    from prefect_ray import RayTaskRunner

SEE_ALL_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1"}
"""Ray hides the GPUs that a task did not get. `tasks.workers.infer_remote.name_device` needs to see them all."""

CONNECT_SECONDS = 10.0

STOP_SECONDS = 20.0
"""How long a stopped run waits for its workers to end. Prefect kills a cancelled run after 30 s."""


class RayCluster:
    """A Ray cluster. This process joins it as a driver at the first use, and leaves it at `leave`.

    Args:
        address: of the cluster's head, ``host:port``, or "auto" for one that this host is part of.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._joined = ExitStack()
        self._runner: RayTaskRunner[Any] | None = None

    def team(self, engine: EngineConfig) -> EngineTeam:
        """The engines that the cluster has room for. Raises `ConfigError` as `join_cluster` and `worker_options`."""
        self._join()
        num_engines, num_on_host = count_workers(worker_options(engine))
        return EngineTeam(num_engines=num_engines, num_on_host=num_on_host, engine=engine)

    @contextmanager
    def submit(self, job: InferJob, dispatch_order: Sequence[int]) -> Iterator[PrefectFutureList[Any]]:
        """One task per partition, on the workers that the cluster has room for."""
        from prefect_ray.context import remote_options

        runner = self._join()
        job = replace(job, checkpoint=str(Path(job.checkpoint).absolute()))
        futures: PrefectFutureList[Any] = PrefectFutureList()  # type: ignore[abstract]
        try:
            with job.stop.make_on_error():
                with remote_options(**worker_options(job.engine)):
                    for partition in dispatch_order:
                        futures.append(runner.submit(infer_on_ray, {"partition": partition, "job": job}))
                yield futures
        finally:
            # A stopped worker ends after its step and keeps its answers.
            if wait(list(futures), STOP_SECONDS).not_done and job.exchange:
                (job.first.run_folder / LATE).touch(mode=0o600)

    def leave(self) -> None:
        """End the workers; the next use joins the cluster again."""
        self._joined.close()
        self._runner = None

    def _join(self) -> "RayTaskRunner[Any]":
        if self._runner is None:
            self._joined.enter_context(join_cluster(self._address))
            from prefect_ray import RayTaskRunner

            # Without the URL of the flow's server, each worker would start a temporary one.
            with get_client(sync_client=True) as client:
                server = str(client.api_url)
            self._joined.enter_context(temporary_settings({PREFECT_API_URL: server}))
            self._runner = self._joined.enter_context(RayTaskRunner(self._address))
        return self._runner


def check_cluster(address: str, engine: EngineConfig, checkpoint: Path) -> None:
    """Join a Ray cluster and leave it.

    Args:
        address: see `RayCluster`.
        engine: of each worker.
        checkpoint: folder of the model.
    Raises:
        CapacityError: the KV budget is below two blocks, see `check_kv_budget`.
        ConfigError: see `join_cluster` and `worker_options`.
    """
    smallest: Dtype = "bfloat16" if engine.dtype == "auto" else engine.dtype  # workers may have another device
    check_kv_budget(replace(engine, dtype=smallest), checkpoint)
    with join_cluster(address):
        worker_options(engine)


@contextmanager
def join_cluster(address: str) -> Iterator[None]:
    """Be a driver of a Ray cluster for the length of the block; its workers keep their models as long. Raises
    `ConfigError` if prefect-ray is not installed, or no cluster answers."""
    if importlib.util.find_spec("prefect_ray") is None:
        raise ConfigError("runner 'ray' needs the package prefect-ray: pip install '.[ray]' in batchloom's checkout")
    import ray

    on_sigterm = signal.getsignal(signal.SIGTERM)
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdecimal():  # Ray itself would retry for minutes
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(
            address=address,
            namespace="batchloom",
            log_to_driver=False,
            logging_level="error",
            runtime_env={"env_vars": SEE_ALL_GPUS},
        )
    except (OSError, RuntimeError, ValueError) as error:
        # A cluster answers, but not to us: with an address, Ray shows its token only if told to.
        is_refused = type(error) is ConnectionError and "RAY_AUTH_MODE" not in os.environ
        hint = "; if it asks for a token, set RAY_AUTH_MODE=token" if is_refused else ""
        raise ConfigError(f"no Ray cluster at {address}, which ray_address names: {error}{hint}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's handler would replace ours, which runs exit handlers
    try:
        yield
    finally:
        ray.shutdown()


def worker_options(engine: EngineConfig) -> Mapping[str, Any]:
    """The resources of each worker: a GPU, or as many cores as threads, at most those of the largest host. Raises
    `ConfigError` if the device names one GPU, or the engine needs several."""
    import ray

    if engine.device not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"on a Ray cluster the device is auto, cuda or cpu, got {engine.device!r}: Ray chooses which")
    if engine.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size {engine.tensor_parallel_size} needs several GPUs for one engine, and a Ray cluster "
            "gives each worker one: set runner to local"
        )
    has_gpus = engine.device == "cuda" or (engine.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
    if has_gpus and engine.disaggregation == "processes":
        raise ConfigError(
            "disaggregation 'processes' computes prompts on a second GPU, and a Ray cluster gives each worker one: set "
            "it to none, or runner to local"
        )
    # Ray would wait forever for a worker with more cores than any host has.
    most_cores = max((int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]), default=1)
    share = {"num_gpus": 1} if has_gpus else {"num_cpus": max(1, min(engine.num_threads, most_cores))}
    # Workers are kept between partitions. Dead ones are replaced without a limit: attempts are counted elsewhere.
    return {**share, "max_calls": 0, "max_retries": -1}


def count_workers(options: Mapping[str, Any]) -> tuple[int, int]:
    """How many workers with these options the cluster has room for, in all and per host; at least one."""
    import ray

    kind, amount = ("GPU", options["num_gpus"]) if "num_gpus" in options else ("CPU", options["num_cpus"])
    num_workers = max(1, int(ray.cluster_resources().get(kind, 0) / amount))
    num_hosts = sum(node["Alive"] for node in ray.nodes())
    return num_workers, cdiv(num_workers, max(1, num_hosts))
