"""Relay attention, the second baseline (RelayAttention section 3.2, Algorithm 1): three launches.

1. shared: every group's rows against its prefix, partial results (system attention),
2. own: every sequence's rows against its own KV, partial results (context attention),
3. merge: the convex combination by log-sum-exp (relay fusion).

Tiles, their shapes and splits are those of the fused kernel, so the two differ only as in the paper: every non-empty
prefix is shared, and each of the three steps is a launch with its own tail.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch

from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.scoring import Scoring
from engine.kernels.triton.cost_model import SharePolicy
from engine.kernels.triton.device_work import DeviceWork
from engine.kernels.triton.fused import Caches, launch_attention
from engine.kernels.triton.merge import merge_partials
from engine.kernels.triton.triton_attention import TritonAttention
from engine.kernels.triton.tuned import Launch
from engine.kernels.triton.work_list import TileField, WorkList


class RelayAttention(TritonAttention):
    """Three launches per layer; every prefix is shared."""

    name: ClassVar[SharePolicy] = "relay"
    graphable = None  # two grids, by the number of prefix tiles

    def plan(self, batch: AttentionBatch, launches: Sequence[Launch] = ()) -> WorkList:
        """Puts prefix tiles first, padded with empty tiles so that the own tiles start at a multiple of 64 bytes."""
        work_list = super().plan(batch, launches)
        tiles = work_list.tiles
        is_prefix = tiles[:, TileField.KV_END] <= tiles[:, TileField.PREFIX_LEN]
        padding = np.zeros((-work_list.num_prefix_tiles % 4, TileField.WIDTH), dtype=np.int32)
        return replace(
            work_list,
            tiles=np.concatenate([tiles[is_prefix], padding, tiles[~is_prefix]]),
            num_prefix_tiles=work_list.num_prefix_tiles + len(padding),
        )

    def _launch(
        self, out: torch.Tensor, query: torch.Tensor, caches: Caches, work: DeviceWork, scoring: Scoring
    ) -> None:
        middle = work.num_prefix_tiles
        for first, last in ((0, middle), (middle, work.num_tiles)):
            if first < last:
                launch_attention(
                    out, query, caches, work, scoring, first_tile=first, num_tiles=last - first, is_merging=False
                )  # fmt: skip
        if work.capacity.num_partials:
            merge_partials(out, work, scoring.sinks)
