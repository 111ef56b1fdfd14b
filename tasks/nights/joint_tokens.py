"""Joins the prompts of several workloads in one file, and counts the tokens that the workloads share."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
from prefect import task
from prefect.cache_policies import NO_CACHE

from engine.planning.range_cuts import num_shared_tokens
from tasks.storage.artifact import ArtifactRef, build_once, open_parquet
from tasks.storage.prompt_order import sort_prompts
from tasks.storage.row_numbers import write_joined


@task(name="join_tokens", retries=0, cache_policy=NO_CACHE, persist_result=False)
def join_tokens(database: str, tokens: Sequence[ArtifactRef]) -> ArtifactRef:
    """The prompts of all files in one file, numbered consecutively; kept in the database's cache. Raises
    `ArtifactError` if a file is not what its reference says."""
    digests = [ref.digest for ref in tokens]
    return build_once(database, "tokens", digests, lambda target: write_joined(tokens, target))


@task(name="count_shared", retries=0, cache_policy=NO_CACHE, persist_result=False)
def count_shared(joint: ArtifactRef, first_row_ids: Sequence[int], folder: Path) -> list[list[int]]:
    """Prompt tokens that each two workloads share: those that one prefix tree of both saves over two trees. A symmetric
    matrix with zeros on its diagonal.

    Args:
        joint, first_row_ids: the prompts of all workloads, and the first row of each.
    """
    num = len(first_row_ids)
    sets = [(number,) for number in range(num)] + list(combinations(range(num), 2))
    num_tokens = dict.fromkeys(sets, 0)
    last: dict[tuple[int, ...], npt.NDArray[np.int32]] = {}
    with open_parquet(joint) as file:
        for row_id, _, prompt in sort_prompts(file, folder):
            owner = int(np.searchsorted(first_row_ids, row_id, side="right")) - 1
            for members in sets:
                if owner in members:
                    before = last.get(members)
                    num_tokens[members] += len(prompt) - (0 if before is None else num_shared_tokens(before, prompt))
                    last[members] = prompt
    shared = [[0] * num for _ in range(num)]
    for one, other in combinations(range(num), 2):
        saved = num_tokens[one,] + num_tokens[other,] - num_tokens[one, other]
        shared[one][other] = shared[other][one] = saved
    return shared
