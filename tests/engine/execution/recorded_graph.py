"""A stand-in for a CUDA graph on the CPU: it repeats what was launched, with the arguments of the capture.

Torch operations are recorded below Python, kernels where Triton's interpreter runs them. A replay runs no Python of the
engine: sizes, addresses and numbers that were read on the host while capturing stay as they were, and what is new has
to come through memory. As on a device, the capture itself leaves nothing that could be used.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor


class _Recorder(TorchDispatchMode):
    """Runs operations, and notes how to run them again into the same results."""

    def __init__(self, launches: list[Callable[[], None]]) -> None:
        super().__init__()
        self._launches = launches
        self.made: list[torch.Tensor] = []
        self.is_within_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.is_within_kernel:
            old = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
            self.made += [tensor for tensor in old if tensor.untyped_storage().data_ptr() not in known]

            def again() -> None:
                new = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
                for target, source in zip(old, new, strict=True):
                    if target.data_ptr() != source.data_ptr():
                        target.copy_(source)

            self._launches.append(again)
        return result


class RecordedGraph:
    """As `engine.execution.step_graphs.DeviceGraph`; counts its replays."""

    def __init__(self) -> None:
        self._launches: list[Callable[[], None]] = []
        self.num_replays = 0

    def capture(self, compute: Callable[[], None]) -> None:
        recorder = _Recorder(self._launches)
        with _kernels_recorded(recorder, self._launches), recorder:
            compute()
        assert len(self._launches) > 10, "hardly anything was recorded"
        for tensor in recorder.made:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)

    def replay(self) -> None:
        self.num_replays += 1
        for launch in self._launches:
            launch()


@contextmanager
def _kernels_recorded(recorder: _Recorder, launches: list[Callable[[], None]]) -> Iterator[None]:
    run = GridExecutor.__call__

    def record(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        recorder.is_within_kernel = True
        try:
            run(executor, *args, **kwargs)
        finally:
            recorder.is_within_kernel = False
        launches.append(lambda: run(executor, *args, **kwargs))

    GridExecutor.__call__ = record
    try:
        yield
    finally:
        GridExecutor.__call__ = run
