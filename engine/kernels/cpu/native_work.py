"""What attention takes in cpp/work_items.h: its shape, the rule of a layer, and a step's work items."""

import ctypes
from itertools import repeat

from engine.kernels.cpu.native_functions import FLOAT, I64, POINTER


class ShapeStructure(ctypes.Structure):
    """`AttentionShape` of cpp/work_items.h."""

    _fields_ = tuple(zip(("num_q_heads", "num_kv_heads", "dim", "block_size"), repeat(ctypes.c_int32)))


class ScoringStructure(ctypes.Structure):
    """`Scoring` of cpp/work_items.h."""

    _fields_ = (("scale", FLOAT), ("softcap", FLOAT), ("window", ctypes.c_int32), ("sinks", POINTER))


class NativeWork(ctypes.Structure):
    """`AttentionWork` of cpp/work_items.h: one step's attention, prepared once and used by every layer. A thread
    computes an item for one KV head at a time. Addresses are of contiguous arrays, which `kept` owns:

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

    _fields_ = (
        *zip(("slots", "shared", "own", "prefix_blocks", "own_blocks", "own_seen", "state"), repeat(POINTER)),
        *zip(("num_rows", "num_shared", "num_own"), repeat(I64)),
    )
    num_rows: int
    kept: tuple[object, ...]
