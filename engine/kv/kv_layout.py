"""Which layers of a model share a block table, where some layers have sliding windows.

Layers with the same window are divided into tables of equally many layers. So a KV block has the same size in every
table, one pool holds the blocks of all tables, and memory moves between kinds of layers as requests need it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.kernels import cdiv

MOST_TABLES = 8
"""About the most tables of a model: each one adds to the preparation of attention in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Block tables of a model.

    Attributes:
        windows: of each table, the number of positions that a row of its layers sees; 0: all.
        tables, slots: of each layer, its table and its index among the layers of that table.
        num_slots: layers in a block. Where a table has fewer layers, a part of its blocks is unused.
    """

    windows: tuple[int, ...]
    tables: tuple[int, ...]
    slots: tuple[int, ...]
    num_slots: int


def find_layout(windows: Sequence[int]) -> KVLayout:
    """Divides layers into tables of as many layers as the rarest window has, so that its blocks have no unused part.
    `windows` has the number of positions that a row of each layer sees; 0: all."""
    kinds: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    num_slots = max(min(map(len, kinds.values())), cdiv(len(windows), MOST_TABLES))
    tables, slots = [0] * len(windows), [0] * len(windows)
    table_windows: list[int] = []
    for window, layers in sorted(kinds.items()):
        for place, layer in enumerate(layers):
            tables[layer], slots[layer] = len(table_windows) + place // num_slots, place % num_slots
        table_windows += [window] * cdiv(len(layers), num_slots)
    return KVLayout(windows=tuple(table_windows), tables=tuple(tables), slots=tuple(slots), num_slots=num_slots)


def kept_windows(windows: tuple[int, ...], config: EngineConfig) -> tuple[int, ...]:
    """The windows of layers, as for `find_layout`, if KV outside the window is freed. Empty where a policy keeps all
    KV: the block cache of sharing "lru" keeps whole prompts, and so does prefill "whole"."""
    return () if config.sharing == "lru" or config.prefill == "whole" else windows


def first_block(num_computed: int, window: int, block_size: int) -> int:
    """The first block of a table that rows after `num_computed` own tokens may read. See `KVLayout`."""
    return max(0, num_computed - window + 1) // block_size if window else 0
