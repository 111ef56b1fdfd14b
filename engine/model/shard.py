"""One rank of a model that is sharded over several devices of a host, and the communication between ranks.

Each rank has a share of the query and KV heads and of the columns of the MLP. Attention's output product and the MLP's
down product then give partial sums, which are reduced over the ranks: two all-reduces per layer (Shoeybi et al. 2019,
"Megatron-LM", section 3).
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
"""Time-out of a collective of CPUs, and of a meeting: another rank may still be reading its weights. On GPUs NCCL's
time-out is off (`TORCH_NCCL_ASYNC_ERROR_HANDLING`), so a rank that hangs is not noticed."""


class Shard:
    """One of `size` ranks, of number `rank`; the first schedules and samples. A process has one, as torch does."""

    is_closed = False
    """Whether the ranks have stopped."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device

    def join(self, meeting_file: Path) -> None:
        """Joins the process group, and waits for the other ranks, which find each other by a file of the first rank:
        NCCL (RCCL) on GPUs, gloo on a CPU. Raises `ConfigError` if this process already has a sharded engine."""
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")  # all ranks are on this host
        # Else the watchdog of torch would end the process when `leave` aborts the group.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        if dist.is_initialized():
            gc.collect()  # an unreferenced engine may still hold the group
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
        """Leaves the process group, even during a collective."""
        if dist.is_initialized():
            if self.device.type != "cpu":
                with contextlib.suppress(Exception):  # the group may have failed already
                    dist.distributed_c10d._abort_process_group()
            if dist.is_initialized():
                dist.destroy_process_group()

    def all_reduce(self, partial_sum: torch.Tensor) -> None:
        """Sums a contiguous tensor over the ranks, in place."""
        dist.all_reduce(partial_sum)

    def agree(self, value: int) -> int:
        """The minimum of the ranks' values."""
        least = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def take_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcasts rank 0's contiguous tensor; the other ranks' are overwritten."""
        dist.broadcast(tensor, src=0)
        return tensor

    def watch(self, steps: "Generator[Any, None, None]") -> "Generator[Any, None, None]":
        """The steps of a run; rank 0's subclass watches the other ranks for failures meanwhile."""
        return steps

    def send(self, batch: TokenBatch) -> None:
        """Sends a step to the other ranks; rank 0's subclass calls it before it computes the step itself."""
