"""Copies between host and device through pinned memory, so that neither waits for the other.

torch's allocator of pinned memory reuses a buffer only after the copies from or to it are done. So each step's arrays
have buffers of their own while a copy is in flight, without bookkeeping here.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array on the device, for what is launched next on the stream. On the CPU it is not copied."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class HostCopies:
    """Copies of tensors to the host, in stream order; the caller waits for them when it has nothing else to do."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._arrived: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._tensors = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> list[torch.Tensor]:
        """The tensors in host memory, once the device has computed and copied them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors
