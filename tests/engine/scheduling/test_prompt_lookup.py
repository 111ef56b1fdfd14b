"""What is guessed: the tokens after the latest occurrence of the longest ending that occurs twice; and how many."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Request, Thinking
from engine.kv.block_pool import BlockPool
from engine.scheduling.prompt_lookup import MOST_GUESSES, MOST_MATCHED, PromptLookup, find_continuation
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step


def find_slowly(tokens: list[int], most: int) -> tuple[int, list[int]]:
    for matched in range(min(MOST_MATCHED, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, matched - 1, -1):
            if tokens[end - matched : end] == tokens[-matched:]:
                return matched, (tokens[end:] * most)[:most]
    return 0, []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, MOST_MATCHED))
def test_the_latest_longest_ending_is_found(tokens: list[int], most: int, fewest: int) -> None:
    matched, found = find_continuation(np.array(tokens, dtype=np.int32), most, fewest)
    expected = find_slowly(tokens, most)
    assert (matched, found.tolist()) == (expected if expected[0] >= fewest else (0, []))


def decoding(prompt: list[int], *, max_new_tokens: int = 40, num_blocks: int = 4, **settings: Any) -> Sequence:
    """A request that has said its first token, the one after the prompt's first, with room for 4 blocks of 4 tokens."""
    request = Request(request_id="a", token_ids=prompt, max_new_tokens=max_new_tokens, **settings)
    sequence = Sequence(request=request, owners=(0,), node=None)
    sequence.reserve(BlockPool(num_blocks, 4), 4 * num_blocks)
    sequence.num_computed = len(prompt)
    sequence.set_token(sequence.length, prompt[0])
    return sequence


def make_lookup(num_weight_rows: int, num_weight_kv_tokens: float) -> PromptLookup:
    """Constrained answers may go on with tokens up to 7."""
    return PromptLookup(
        num_weight_rows=num_weight_rows,
        num_weight_kv_tokens=num_weight_kv_tokens,
        count_allowed=lambda sequence, token_ids: int(np.cumprod(token_ids <= 7).sum()),
    )


def guess(lookup: PromptLookup, *sequences: Sequence, room: int = 100) -> list[npt.NDArray[np.int32]]:
    step = Step(block_size=4, room=room)
    for sequence in sequences:
        step.add(step.decodes, sequence)
    lookup.add_guesses(step)
    assert [count for _, count in step.decodes] == [1 + sequence.num_guesses for sequence in sequences]
    assert step.room == room - len(sequences) - step.num_guessed_tokens
    return [s.own_token_ids[s.length : s.length + s.num_guesses] for s in sequences]


def test_guesses_stay_within_the_step_the_memory_and_the_answer() -> None:
    lookup = make_lookup(10**6, 1)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12]
    assert guess(lookup, decoding(prompt))[0].tolist() == prompt[1 : 1 + MOST_GUESSES]
    assert guess(lookup, decoding(prompt), room=3)[0].tolist() == [6, 7]
    assert guess(lookup, decoding(prompt, num_blocks=3))[0].tolist() == [6, 7, 8], "9 own tokens of 12 are taken"
    assert guess(lookup, decoding(prompt, max_new_tokens=3))[0].tolist() == [6], "the last token needs no row"
    assert guess(lookup, decoding(prompt, max_new_tokens=2))[0].tolist() == []


def test_a_constrained_answer_is_guessed_up_to_what_it_may_not_say() -> None:
    lookup = make_lookup(10**6, 1)
    thinking = Thinking(end_token_id=99, closing=(99,), max_tokens=20)
    assert guess(lookup, decoding([5, 6, 7, 8, 9, 10], thinking=thinking))[0].tolist() == [6, 7]
    assert guess(lookup, decoding([5, 8, 7, 8, 9, 10], thinking=thinking))[0].tolist() == []


@pytest.mark.parametrize("is_right", [True, False])
def test_what_was_right_so_far_decides_how_much_is_guessed(is_right: bool) -> None:
    """Where a row costs as much as it saves, guesses are made while they have been right."""
    lookup = make_lookup(2, 10**6)
    for _ in range(100):
        for num_matched in range(1, 9):
            lookup.book(num_matched, is_right=is_right)
    assert len(guess(lookup, decoding([5, 6, 7, 8, 9]))[0]) == (MOST_GUESSES if is_right else 0)


def test_a_step_full_of_prompts_computes_no_guess_that_an_emptier_one_does() -> None:
    lookup = make_lookup(64, 10**6)
    prompt = [5, 6, 7, 8, 9, 5, 6]
    crowd = Sequence(request=Request(request_id="b", token_ids=[1] * 1000), owners=(1,), node=None)
    full = Step(block_size=4, room=2000)
    full.add(full.decodes, decoding(prompt))
    full.add(full.suffixes, crowd)
    lookup.add_guesses(full)
    assert full.num_guessed_tokens == 0
    assert len(guess(lookup, decoding(prompt))[0]) > 0


class ThoroughLookup(PromptLookup):
    """Looks up every ending, even where no guess after it would be made."""

    def _look_up(self, sequence: Sequence, step: Step, fewest: int) -> range:
        return super()._look_up(sequence, step, 1)


@given(st.lists(st.lists(st.integers(1, 3), min_size=2, max_size=30), min_size=1, max_size=5), st.data())
def test_endings_are_left_out_only_where_no_guess_would_be_made(prompts: list[list[int]], data: st.DataObject) -> None:
    """Whatever was right so far, and however much a right guess saves."""
    costs = {"num_weight_rows": data.draw(st.integers(1, 64)), "num_weight_kv_tokens": data.draw(st.integers(1, 999))}
    booked = data.draw(st.lists(st.tuples(st.integers(1, 8), st.booleans()), max_size=60))
    room, guesses = data.draw(st.integers(len(prompts), 20)), []
    for kind in (PromptLookup, ThoroughLookup):
        lookup = kind(**costs, count_allowed=lambda sequence, token_ids: len(token_ids))
        for num_matched, is_right in booked:
            lookup.book(num_matched, is_right=is_right)
        found = guess(lookup, *(decoding(prompt, num_blocks=10) for prompt in prompts), room=room)
        guesses.append([each.tolist() for each in found])
    assert guesses[0] == guesses[1]
