"""Tokens of a step that the step before samples, when only the device knows them yet."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.model.shard import Shard


def fill_in(
    input_ids: torch.Tensor, pending_token_ids: torch.Tensor | None, shard: "Shard | None" = None
) -> torch.Tensor:
    """Token ids int64 ``[T]`` with each negative one, -1 - row, replaced by pending_token_ids[row]. In a sharded model,
    only rank 0 has these, int64, and broadcasts the result to the other ranks. See `TokenBatch`."""
    if shard is None or shard.rank == 0:
        assert pending_token_ids is not None, "a pending token was sampled by the previous step"
        is_pending = input_ids < 0
        rows = torch.where(is_pending, -1 - input_ids, 0)
        input_ids = torch.where(is_pending, pending_token_ids.index_select(0, rows), input_ids)
    return input_ids if shard is None else shard.take_first(input_ids)
