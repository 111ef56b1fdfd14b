"""The one loaded model of a process, and the memory of those before it."""

import gc
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ModelError
from tasks.partitions import engine_host
from tasks.partitions.engine_host import EngineHost
from tasks.runs.infer_job import InferJob
from tasks.workloads.workload import load_workload
from tests.adapters import save_adapter
from tests.sources import make_job


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Garbage in cycles stays until somebody asks for it."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize(
    "next_model", ["another", "the same after a release", "the same with less memory", "an adapter"]
)
def test_a_model_is_gone_before_the_next_is_loaded(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_model: str
) -> None:
    """Frames of its first imports may hold a model in a cycle; here it refers to itself."""
    host, load = EngineHost(), engine_host._load_engine
    loaded: list[Callable[[], Any]] = []

    def load_into_nothing(*given: Any) -> Any:
        assert [model() for model in loaded] == [None] * len(loaded)
        engine: Any = load(*given)
        engine.itself = engine
        loaded.append(weakref.ref(engine))
        return engine

    def use(job: InferJob) -> None:
        with host.use(job):
            pass

    monkeypatch.setattr(engine_host, "_load_engine", load_into_nothing)
    workload = load_workload("snippets")
    job = make_job("", workload, tiny_llama)
    use(job)
    use(job)
    if next_model == "another":
        job = make_job("", workload, shutil.copytree(tiny_llama, tmp_path / "another"))
    elif next_model == "the same after a release":
        host.release()
    elif next_model == "the same with less memory":
        assert host.lower_memory()
    else:
        job = make_job("", workload.with_adapter(save_adapter(tiny_llama, tmp_path)), tiny_llama)
    use(job)
    assert len(loaded) == 2
    host.release()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_released_model_leaves_a_gpu_at_once(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The end of a night on a CPU does not look for garbage."""
    host = EngineHost()
    with host.use(make_job("", load_workload("snippets"), tiny_llama)) as model:
        engine: Any = model.engine
    del model
    engine.itself = engine
    left = weakref.ref(engine)
    del engine
    monkeypatch.setattr(engine_host, "resolve_device", lambda name: torch.device(device))
    host.release()
    assert (left() is None) == (device == "cuda")


def test_a_model_that_was_replaced_after_the_run_began_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    """Its answers would be kept as those of the model that was there before."""
    folder = shutil.copytree(tiny_llama, tmp_path / "current")
    host, job = EngineHost(), make_job("", load_workload("snippets"), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\1\2\3")
    with pytest.raises(ModelError, match="current' here differs from the one where the run began"), host.use(job):
        raise AssertionError("the model is in use")
    shutil.rmtree(folder)
    shutil.copytree(tiny_llama, folder)
    with host.use(job) as model:
        assert model.engine.is_usable
    host.release()
