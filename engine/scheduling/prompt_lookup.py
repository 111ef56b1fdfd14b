"""Prompt lookup decoding: an answer's next tokens are guessed from its prompt and its earlier tokens.

The tokens that followed the latest occurrence of the answer's ending are computed as further rows of its chunk. Each
row's token is chosen as without guessing. A guess that differs from the chosen token is dropped, with the guesses after
it; so guesses change how many steps an answer takes, never the answer.

Saxena, "Prompt Lookup Decoding" (2023); draft tokens are checked as in Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding" (2023), but by drawing the same random numbers as without them.
"""

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from engine.kv.block_pool import BlockPool
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step

MOST_MATCHED = 6
"""Longest ending, in tokens, that is looked up."""

MOST_GUESSES = 4
"""Most tokens that are guessed for one answer in one step."""

_PRIOR_TRIES = 10


class PromptLookup:
    """Guesses for the decode rows of one run's steps, as many as are expected to make the run faster.

    A guess costs one row. A right guess saves a decode token of a later step: its row, the reading of its sequence's
    KV, and its share of the reading of the weights, which is large where few answers are left. So a guess is computed
    where its chance of being right times this saving exceeds one row. The chance is the share of right guesses of this
    run after an ending that matched as many tokens; the guess after another one has an ending longer by one.

    Args:
        num_weight_rows: rows that a step computes in the time in which it reads the model's weights.
        num_weight_kv_tokens: tokens whose KV it reads in that time.
        count_allowed: given a constrained answer and guesses, returns how many of the first guesses are allowed.
    """

    def __init__(
        self,
        *,
        num_weight_rows: int,
        num_weight_kv_tokens: float,
        count_allowed: Callable[[Sequence, npt.NDArray[np.int32]], int],
    ) -> None:
        self._num_weight_rows = num_weight_rows
        self._num_weight_kv_tokens = num_weight_kv_tokens
        self._count_allowed = count_allowed
        self._num_tried = [_PRIOR_TRIES] * (MOST_MATCHED + 1)
        self._num_right = [_PRIOR_TRIES * matched / (matched + 2) for matched in range(MOST_MATCHED + 1)]

    def add_guesses(self, step: Step) -> None:
        """Appends guesses to the decode chunks of a step, the likeliest first, as room and KV blocks allow."""
        if not step.decodes or not step.room:
            return
        num_tokens = sum(count for _, count in (*step.decodes, *step.suffixes)) + sum(step.prefixes.values())
        row_rows = 1 + self._num_weight_rows * _mean_kv_tokens(step) / self._num_weight_kv_tokens
        chances = [right / tried for right, tried in zip(self._num_right, self._num_tried, strict=True)]
        saved_rows = row_rows + self._num_weight_rows / num_tokens  # by a right guess; further guesses save less
        fewest = next((matched for matched, chance in enumerate(chances) if chance * saved_rows > 1), None)
        if fewest is None:
            return
        guesses: list[tuple[float, int]] = []
        for index, (sequence, count) in enumerate(step.decodes):
            if count == sequence.num_uncomputed:
                chance = 1.0
                for matched in self._look_up(sequence, step, fewest):
                    chance *= chances[min(matched, MOST_MATCHED)]
                    guesses.append((chance, index))
        num_expected = float(num_tokens)
        for chance, index in sorted(guesses, key=lambda guess: -guess[0])[: step.room]:
            if chance * (row_rows + self._num_weight_rows / num_expected) <= 1:
                break
            num_expected += chance
            # The chunk holds all known tokens and earlier guesses; the next row is this guess.
            sequence, count = step.decodes[index]
            step.decodes[index] = sequence, count + 1
            sequence.num_guesses += 1
            step.num_guessed_tokens += 1
            step.room -= 1

    def check_guesses(
        self, step: Step, sequence: Sequence, place: int, token_ids: Iterable[int], pool: BlockPool
    ) -> None:
        """Sets a sequence's own tokens from `place` on. Where they were guessed right, the step has written their KV
        already.

        Args:
            step: has computed the guesses.
            token_ids: those that were chosen or forced, the next ones of the sequence.
        """
        for index, token_id in enumerate(token_ids, place):
            was_guessed, is_right = sequence.num_guesses > 0, sequence.set_token(index, token_id)
            if was_guessed:
                self.book(index - sequence.ending_start, is_right=is_right)
                step.num_right_tokens += is_right
            if is_right:
                sequence.num_computed += 1
                pool.remember(sequence, sequence.num_computed - 1)

    def book(self, num_matched: int, *, is_right: bool) -> None:
        """Counts a guess after an ending of `num_matched` tokens as right or wrong."""
        matched = min(num_matched, MOST_MATCHED)
        self._num_tried[matched] += 1
        self._num_right[matched] += is_right

    def _look_up(self, sequence: Sequence, step: Step, fewest: int) -> range:
        """Writes guesses behind a sequence's tokens, as KV blocks allow; returns the lengths of their endings, none of
        less than `fewest` tokens."""
        request, length = sequence.request, sequence.length
        num_free_slots = len(sequence.block_ids) * step.block_size - length
        num_left = sequence.num_suffix + request.max_new_tokens - 1 - length  # the last token of an answer needs no row
        most = min(step.room, MOST_GUESSES, num_free_slots, num_left)
        if request.mode != "generate" or most <= 0 or sequence.num_known < length:
            return range(0)
        token_ids = sequence.own_token_ids[:length]
        if sequence.prefix_length:
            token_ids = np.concatenate([request.token_ids[: sequence.prefix_length], token_ids])
        matched, found = find_continuation(token_ids, most, fewest)
        if request.is_constrained and len(found):
            found = found[: self._count_allowed(sequence, found)]
        sequence.own_token_ids[length : length + len(found)] = found
        sequence.ending_start = length - matched
        return range(matched, matched + len(found))


def _mean_kv_tokens(step: Step) -> float:
    """KV tokens that a step reads for each decode token, on average; a shared prefix is read once."""
    nodes = {sequence.node for sequence, _ in step.decodes if sequence.node is not None}
    num_tokens = sum(sequence.num_computed for sequence, _ in step.decodes) + sum(node.end for node in nodes)
    return num_tokens / len(step.decodes)


def find_continuation(
    token_ids: npt.NDArray[np.int32], most: int, fewest: int = 1
) -> tuple[int, npt.NDArray[np.int32]]:
    """The tokens after the latest earlier occurrence of the longest ending that has one, repeated up to `most` tokens;
    and before them the length of that ending, at most `MOST_MATCHED`: 0, and none, where it is below `fewest`.

    Args:
        token_ids: int32, a prompt and its answer so far.
        fewest: from 1 on; where endings of so many tokens are rare, few numpy calls are needed.
    """
    fewest = min(fewest, len(token_ids))
    is_end = token_ids[fewest - 1 : -1] == token_ids[-1]
    if fewest > 1:  # the first token of the ending, too: both differ in nearly all places
        is_end &= token_ids[:-fewest] == token_ids[-fewest]
    ends, matched, start = is_end.nonzero()[0] + fewest - 1, 0, 0
    while len(ends) and matched < MOST_MATCHED:
        matched, start = matched + 1, int(ends[-1]) + 1
        ends = ends[int(ends[0] < matched) :]  # only the first one may be that near to the prompt's start
        ends = ends[token_ids.take(ends - matched) == token_ids[-1 - matched]]
    if matched < fewest:
        return 0, token_ids[:0]
    found = token_ids[start : start + most]
    return matched, found if len(found) == most else np.resize(found, most)
