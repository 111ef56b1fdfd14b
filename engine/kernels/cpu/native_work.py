"""One step's attention as work items of the CPU kernels."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWork:
    """One step's attention, prepared once and used by every layer. A thread computes an item for one KV head at a time.

    Attributes:
        slots: int64 ``[T]``, where each row's key and value are written.
        shared: int64 ``[n, 4]``, items of rows of several sequences of a group against their prefix, which is read
            once for all of them: first row, number of rows, start in prefix_blocks, prefix tokens.
        own: int64 ``[m, 7]``, items of rows of one sequence: first row, number of rows, start in own_blocks, own tokens
            that the first row sees, start in prefix_blocks, prefix tokens, tokens that shared items have covered. With
            a `shared_unit` these include the own tokens in the prefix's last, partial unit.
        prefix_blocks, own_blocks: int32 block tables.
        own_seen: int32 ``[T]``, own tokens that each row sees; a window's start is computed from it.
        state: float32 scratch memory, in which shared items leave their partial results for own items.
    """

    slots: Ints
    shared: Ints
    own: Ints
    prefix_blocks: npt.NDArray[np.int32]
    own_blocks: npt.NDArray[np.int32]
    own_seen: npt.NDArray[np.int32]
    state: torch.Tensor
