"""Bfloat16 and float32 on the CPU with results that do not depend on what else is computed, to the last bit.

Products, norms and rotation are so anyway: a row's sums are made in one order, however rows and columns are spread over
tiles and threads. Attention meets KV in chunks, and brings a row's sum and output to its new maximum after each. Here
chunks are counted from the prompt's first token, and not from the end of what it shares.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch

from engine.errors import ModelError
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.cpu.native_layers import NativeBackend, PackedLayers, PackedOutputLayer
from engine.kernels.cpu.native_work import NativeWork
from engine.kernels.decoder_layer import DecoderLayers, LayerWeights

CHUNK_TOKENS = 256
"""KV tokens between two rescalings of the output; as in cpp/attention.h."""

_ROWS_AT_ONCE = 64


class DeterministicBackend(NativeBackend):
    """The CPU kernels, for prefixes that end with a block."""

    def prepare(self, batch: AttentionBatch) -> NativeWork:
        """See `AttentionShape.prepare`."""
        return super().prepare(share_whole_chunks(batch))

    def make_layers(self, weights: Iterable[LayerWeights]) -> DecoderLayers:
        """See `NativeBackend.make_layers`.

        Raises:
            ModelError: a layer has a sliding window, or a size so that its products would be torch's.
        """
        layers = super().make_layers(_without_windows(weights))
        if not isinstance(layers, PackedLayers):
            raise ModelError("deterministic takes layers with sizes of multiples of 32")
        return layers

    def make_output_layer(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedOutputLayer:
        """See `NativeBackend.make_output_layer`.

        Raises:
            ModelError: it is not covered, so that its product would be torch's.
        """
        layer = super().make_output_layer(weight, bias)
        if layer is None:
            raise ModelError(f"deterministic takes a vocabulary of a multiple of 32 tokens, got {len(weight)}")
        return layer

    @staticmethod
    def label_columns(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `columns_in_float64`; each sum is made by itself, along the depth."""
        wide, columns = hidden.double().numpy(), weight.double().numpy()
        parts = [
            np.add.reduce(wide[first : first + _ROWS_AT_ONCE, None] * columns, axis=-1)
            for first in range(0, len(wide), _ROWS_AT_ONCE)
        ]
        found = torch.from_numpy(np.concatenate([np.empty((0, len(columns))), *parts]))
        return found if bias is None else found + bias.double()


def _without_windows(weights: Iterable[LayerWeights]) -> Iterator[LayerWeights]:
    for layer in weights:
        if layer.window:
            raise ModelError(
                f"deterministic takes layers without a sliding window, got one of {layer.window} positions"
            )
        yield layer


def share_whole_chunks(batch: AttentionBatch) -> AttentionBatch:
    """The same attention, with what each prefix has beyond whole chunks in front of its sequences' own KV.

    Args:
        batch: of prefixes that end with a block.
    """
    whole_lens = batch.prefix_lens // CHUNK_TOKENS * CHUNK_TOKENS
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
