"""Lists of token ids to prefix groups, for callers without tables."""

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError, RequestError
from engine.planning.group import PrefixGroup
from engine.planning.planner import PlanMethod, plan_prompts
from engine.planning.prefix_tree import TokenArray

Prompt = Sequence[int] | npt.NDArray[np.integer[Any]]


def plan_prefix_groups(
    sequences: Sequence[Prompt], *, method: PlanMethod = "exact", block_size: int | None = None
) -> list[PrefixGroup]:
    """Groups prompts by the prefix they share, so that each prefix and each identical prompt is computed once.

    Groups come in prefix tree order, the same for any order of ``sequences`` up to request_indices. Every request is in
    exactly one group. A prompt for which no prefix pays off is a group of its own with an empty prefix.

    Args:
        sequences: token ids; prefixes and suffixes are views of those that are int32 arrays.
        method: "exact" or "paper"; see `engine.planning.planner.PlanMethod`.
        block_size: tokens in the KV blocks that groups share (`EngineConfig.shared_block_size`); None: groups share
            none.
    Raises:
        RequestError: a sequence is empty or holds something else than int32 integers; the message names its index.
        ConfigError: the method is unknown, or block_size is not a positive whole number.
    """
    if not isinstance(sequences, Iterable):
        raise RequestError(f"sequences must be lists of token ids, got {sequences!r}")
    if block_size is not None and not (type(block_size) is int and block_size > 0):
        raise ConfigError(f"block_size must be None or a positive whole number, got {block_size!r}")
    prompts = [_token_array(sequence, index) for index, sequence in enumerate(sequences)]
    return plan_prompts(prompts, method=method, block_size=block_size)[0].groups()


def _token_array(sequence: Prompt, index: int) -> TokenArray:
    """One prompt as a contiguous int32 array; a view where it is one already."""
    try:
        if isinstance(sequence, np.ndarray):
            if sequence.ndim != 1 or sequence.dtype.kind not in "iu":
                raise TypeError(f"got an array of {sequence.dtype} with shape {sequence.shape}")
            tokens = np.ascontiguousarray(sequence, dtype=np.int32)
            if sequence.dtype != np.int32 and not np.array_equal(tokens, sequence):
                raise OverflowError(f"got values from {sequence.min()} to {sequence.max()}")
        else:
            # struct refuses values that are not int32, at half the cost of numpy's conversion.
            tokens = np.frombuffer(struct.pack(f"{len(sequence)}i", *sequence), dtype=np.int32)
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise RequestError(f"sequence {index}: token ids must be integers that fit int32: {error}") from error
    if len(tokens) == 0:
        raise RequestError(f"sequence {index}: the prompt must hold at least one token, got none")
    return tokens
