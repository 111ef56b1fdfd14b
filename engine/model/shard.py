"""One rank of a model that is spread over several devices of a host, and what the ranks tell each other.

Each rank has a share of the query and KV heads and of the columns of the MLP. The products that follow, attention's
output and the MLP's down, give partial sums of all columns, which are added up over the ranks: two sums a layer
(Shoeybi et al. 2019, "Megatron-LM", section 3).
"""

import contextlib
import gc
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from engine.errors import ConfigError
from engine.scheduling.token_batch import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Generator

LONGEST_WAIT = timedelta(minutes=20)
"""For another rank, which may still be reading its weights."""


class Shard:
    """The part of one rank. torch knows one group of ranks in a process, so there is one shard in it at a time.

    Attributes:
        rank: 0 schedules and samples.
        size: number of ranks.
        device: of this rank.
    """

    is_closed = False
    """Whether the ranks have ended."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device

    def join(self, meeting_file: Path) -> None:
        """Waits until all ranks are there: NCCL (RCCL) on GPUs, gloo on a CPU.

        Args:
            meeting_file: a path in a folder that the ranks alone use.
        Raises:
            ConfigError: there is another such engine in this process.
        """
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")  # all ranks are on this host
        os.environ.setdefault(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"
        )  # `leave` aborts; the watchdog would end the process
        if dist.is_initialized():
            gc.collect()  # a dropped engine may not have been collected
        if dist.is_initialized():
            raise ConfigError(
                f"tensor_parallel_size {self.size}: this process has an engine on several devices already"
            )
        dist.init_process_group(
            "gloo" if self.device.type == "cpu" else "nccl",
            store=dist.FileStore(str(meeting_file), self.size),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.size,
            timeout=LONGEST_WAIT,
        )

    def leave(self) -> None:
        """Ends the group here, in the middle of a sum, too."""
        if dist.is_initialized():
            if self.device.type != "cpu":
                with contextlib.suppress(Exception):  # of a group that has failed already
                    dist.distributed_c10d._abort_process_group()
            if dist.is_initialized():
                dist.destroy_process_group()

    def all_reduce(self, partial_sum: torch.Tensor) -> None:
        """Adds up the ranks' tensors, contiguous and of one shape, in place."""
        dist.all_reduce(partial_sum)

    def agree(self, value: int) -> int:
        """The least of the ranks' values."""
        least = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def take_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """The contiguous tensor with what the first rank's holds; overwritten on the others."""
        dist.broadcast(tensor, src=0)
        return tensor

    def watch(self, steps: "Generator[Any, None, None]") -> "Generator[Any, None, None]":
        """The steps of a run, which the first rank watches for failures of the others."""
        return steps

    def send(self, batch: TokenBatch) -> None:
        """Has the other ranks compute a step; the first rank calls it before it computes the step itself."""
