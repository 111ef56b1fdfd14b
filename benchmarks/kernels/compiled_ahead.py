"""Compiles launches in other processes, so that the measuring process does not wait for the compiler."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

from benchmarks.kernels.cross_compile import compile_attention
from benchmarks.kernels.launch_candidates import fitted
from engine.kernels.triton.tuned import Launch


@contextmanager
def compiled_ahead(
    launches: Sequence[Launch], architecture: str, bits: int, head_dim: int
) -> Iterator[list[Future[Launch | None]]]:
    """The results of `fit_and_compile`, in order, computed on all cores but one.

    Processes are forked from a server that has imported the compiler but not used the device, since a process that has
    used it cannot be forked. The end of the block waits for running compilations.

    Args:
        architecture, bits, head_dim: see `fitted`.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(max(1, len(os.sched_getaffinity(0)) - 1), mp_context=context)
    try:
        yield [pool.submit(fit_and_compile, launch, architecture, bits, head_dim) for launch in launches]
    finally:
        pool.shutdown(cancel_futures=True)


def fit_and_compile(launch: Launch, architecture: str, bits: int, head_dim: int) -> Launch | None:
    """See `fitted`. If the launch fits, Triton's cache then has both kernels with which `TuningBench` measures it.

    Args:
        launch, architecture, bits, head_dim: see `fitted`.
    """
    found = fitted(launch, architecture, bits, head_dim)
    if found is not None:
        element = "bf16" if bits == 16 else "fp32"
        compile_attention(architecture, found, element=element, head_dim=head_dim, is_merging=False)
    return found
