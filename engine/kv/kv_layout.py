"""Which layers of a model share a block table, where some of them see a window alone.

Layers that see alike are cut into tables of equally many layers. So a KV block is the same piece of memory in every
table, one pool holds them all, and memory moves between kinds of layers as requests need it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.kernels import cdiv

MOST_TABLES = 8
"""About so many tables at most: each is one more to prepare for attention in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Block tables of a model.

    Attributes:
        windows: of each table, the positions that a row of its layers sees; 0: all.
        tables, slots: of each layer, its table and its place among the layers of that table.
        num_slots: layers of a table, and of a block. Where a table has fewer layers, the rest of its blocks is unused.
    """

    windows: tuple[int, ...]
    tables: tuple[int, ...]
    slots: tuple[int, ...]
    num_slots: int

    @property
    def num_tables(self) -> int:
        return len(self.windows)


def find_layout(windows: Sequence[int]) -> KVLayout:
    """Tables of as many layers as the rarest kind has, so that its blocks have no unused part.

    Args:
        windows: of each layer, the positions that a row sees; 0: all.
    """
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
    """The windows beyond which KV is given up, of each layer; empty where a policy keeps it all.

    A cache that finds blocks by their tokens keeps whole prompts, and whole prompts are computed where they lie.

    Args:
        windows: of each layer, the positions that a row sees; 0: all.
        config: the policies.
    """
    return () if config.sharing == "lru" or config.prefill == "whole" else windows


def first_block(num_computed: int, window: int, block_size: int) -> int:
    """The first block of a table that rows after `num_computed` own tokens may read.

    Args:
        window: positions that a row sees, its own included; 0: all.
        block_size: tokens in a block.
    """
    return max(0, num_computed - window + 1) // block_size if window else 0
