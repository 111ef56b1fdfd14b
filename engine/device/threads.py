"""The threads of a CPU with which an engine computes."""

import logging
import os

LOGGER = logging.getLogger("batchloom.engine")


def use_threads(num_threads: int) -> None:
    """Sets torch's number of CPU threads, see `usable_threads`."""
    import torch  # seconds to import

    torch.set_num_threads(usable_threads(num_threads))


def usable_threads(num_threads: int) -> int:
    """num_threads, but at most one for each core that this process may use; a reduction is logged."""
    num_cores = len(os.sched_getaffinity(0))
    if num_threads > num_cores:
        LOGGER.info("num_threads is %d, this process may use %d cores: %d threads", num_threads, num_cores, num_cores)
    return min(num_threads, num_cores)
