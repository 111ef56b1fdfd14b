"""Which nodes of a prefix tree become prefixes (BatchLLM section 4.2). A prompt shares at most one.

"exact"
    computes the fewest prompt tokens that any such grouping can, where groups share the full KV blocks that they begin
    with. A leaf uses the deepest chosen node above it, or is planned alone and shares nothing but such blocks.
"paper"
    is Algorithm 1 of BatchLLM, which compares one level of the tree with the next, bottom up.
"none"
    chooses none: only identical prompts are computed once. Encoders need it, in which every token sees the whole text.
"""

from typing import Literal, get_args

import numpy as np

from engine.errors import ConfigError
from engine.planning.choose_by_paper import choose_by_paper
from engine.planning.choose_exactly import choose_exactly
from engine.planning.prefix_tree import IndexArray, PrefixTree

PlanMethod = Literal["exact", "paper", "none"]


def choose_prefixes(tree: PrefixTree, method: PlanMethod, block_size: int | None = None) -> IndexArray:
    """The node whose tokens each leaf uses as its prefix, or 0 for none: int64 ``[num_leaves]``.

    Args:
        tree, method: of the batch.
        block_size: tokens in a KV block, for "exact"; None: groups share nothing, and prefixes may be of any length.
    Raises:
        ConfigError: the method is unknown.
    """
    if method not in get_args(PlanMethod):
        raise ConfigError(f"method must be one of {', '.join(map(repr, get_args(PlanMethod)))}, got {method!r}")
    if method == "none" or tree.num_nodes == 1:  # nothing is shared
        return np.zeros(tree.num_leaves, dtype=np.int64)
    return choose_exactly(tree, block_size) if method == "exact" else choose_by_paper(tree)
