"""Bfloat16 and float32 on the CPU with results that do not depend on the rest of the batch, to the last bit.

Products, norms and rotation always have this property: they sum a row in one order, however rows and columns are split
over tiles and threads. Attention adds up a row's sum and output chunk of KV by chunk. Here the chunks start at the
prompt's first token, not at the end of the shared prefix.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch

from engine.errors import ModelError
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.cpu.layer_structures import NativeWork
from engine.kernels.cpu.native import NativeBackend
from engine.kernels.cpu.native_layers import PackedOutputLayer
from engine.kernels.decoder_layer import DecoderLayers, LayerWeights

CHUNK_TOKENS = 256
"""KV tokens whose values are applied at once; the same as CHUNK in cpp/attention.h."""

_BYTES_AT_ONCE = 32 << 20
"""Of the products of rows with labels' weights, before they are added up."""


class DeterministicBackend(NativeBackend):
    """The C++ kernels; prefixes must end at the end of a KV block."""

    def prepare(self, batch: AttentionBatch) -> NativeWork:
        """See `AttentionShape.prepare`."""
        return super().prepare(share_whole_chunks(batch))

    def make_layers(self, weights: Iterable[LayerWeights]) -> DecoderLayers:
        """See `NativeBackend.make_layers`. Raises `ModelError` for a sliding window, or an unsupported size."""
        layers = super().make_layers(_without_windows(weights))
        if layers is None:
            raise ModelError("deterministic takes layers with sizes of multiples of 32")
        return layers

    def make_output_layer(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedOutputLayer:
        """See `NativeBackend.make_output_layer`. Raises `ModelError` for a vocabulary's size that is not supported."""
        layer = super().make_output_layer(weight, bias)
        if layer is None:
            raise ModelError(f"deterministic takes a vocabulary of a multiple of 32 tokens, got {len(weight)}")
        return layer

    @staticmethod
    def label_columns(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `columns_in_float64`; each sum along the depth is computed in one order."""
        wide, columns = hidden.double().numpy(), weight.double().numpy()
        num_rows = max(1, _BYTES_AT_ONCE // max(1, columns.nbytes))
        parts = [
            np.add.reduce(wide[first : first + num_rows, None] * columns, axis=-1)
            for first in range(0, len(wide), num_rows)
        ]
        found = torch.from_numpy(np.concatenate([np.empty((0, len(columns))), *parts]))
        return found if bias is None else found + bias.double()


def _without_windows(weights: Iterable[LayerWeights]) -> Iterator[LayerWeights]:
    for layer in weights:
        if window := layer.scoring.window:
            raise ModelError(f"deterministic takes layers without a sliding window, got one of {window} positions")
        yield layer


def share_whole_chunks(batch: AttentionBatch) -> AttentionBatch:
    """The same attention with each prefix of whole blocks cut to whole chunks; the rest goes in front of suffixes."""
    unit = math.lcm(CHUNK_TOKENS, batch.block_size)  # so that the rest begins with a block
    whole_lens = batch.prefix_lens // unit * unit
    if np.array_equal(whole_lens, batch.prefix_lens):
        return batch
    assert not (batch.prefix_lens % batch.block_size).any(), "a prefix ends within a block"
    firsts = batch.prefix_block_starts[:-1] + whole_lens // batch.block_size
    lasts = batch.prefix_block_starts[:-1] + batch.prefix_lens // batch.block_size
    groups = np.repeat(np.arange(batch.num_groups), np.diff(batch.group_starts))
    tables = [
        np.concatenate([batch.prefix_block_ids[firsts[group] : lasts[group]], batch.suffix_block_table[start:end]])
        for group, start, end in zip(groups, batch.suffix_block_starts[:-1], batch.suffix_block_starts[1:], strict=True)
    ]
    return replace(
        batch,
        prefix_lens=whole_lens,
        suffix_lens=batch.suffix_lens + (batch.prefix_lens - whole_lens)[groups],
        suffix_block_table=np.concatenate(tables),
        suffix_block_starts=np.cumsum([0, *map(len, tables)], dtype=np.int32),
    )
