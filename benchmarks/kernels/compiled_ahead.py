"""Compiles launches in other processes, so that the measuring process does not wait for the compiler."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

from benchmarks.kernels.launch_candidates import fitted
from engine.kernels.triton.tuned import Launch


@contextmanager
def compiled_ahead(
    launches: Sequence[Launch], architecture: str, bits: int, head_dim: int
) -> Iterator[list[Future[Launch | None]]]:
    """The results of `fitted`, in order, computed on all cores but one; the kernels that fit are in Triton's cache.

    Processes are forked from a server that has imported the compiler but not used the device, since a process that has
    used it cannot be forked. The end of the block waits for running compilations.

    Args:
        architecture, bits, head_dim: see `fitted`.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(max(1, len(os.sched_getaffinity(0)) - 1), mp_context=context)
    try:
        yield [pool.submit(fitted, launch, architecture, bits, head_dim) for launch in launches]
    finally:
        pool.shutdown(cancel_futures=True)
