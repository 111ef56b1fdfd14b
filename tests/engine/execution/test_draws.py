"""Draws follow the distribution that temperature, top-k and top-p leave, and depend on nothing but their own row."""

import weakref

import numpy as np
import pytest
import torch

from engine import Penalties, Request
from engine.execution.draws import list_draws, sample
from engine.kernels.draw import draw_tokens
from engine.kernels.torch_output_layer import largest_logits
from engine.scheduling.sequence import Sequence

VOCAB = 12


class Identity:
    """A model for hidden states that are logits already."""

    draw_tokens = staticmethod(draw_tokens)

    def __init__(self, vocab_size: int = VOCAB) -> None:
        self.vocab_size = vocab_size

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def most_likely(self, hidden: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        return hidden.argmax(dim=-1)


def row_of(num_answered: int = 0, **parameters: object) -> tuple[Sequence, int]:
    """A row of a request with a prompt of one token, and an answer so far whose tokens do not matter."""
    request = Request(request_id="a", token_ids=[1], **parameters)
    return Sequence(request=request, owners=(0,), node=None), 1 + num_answered


def draws(logits: torch.Tensor, count: int, **parameters: float) -> torch.Tensor:
    """How often each token was drawn, over `count` seeds."""
    rows = [row_of(seed=seed, **parameters) for seed in range(count)]
    tokens = sample(logits.expand(count, -1), Identity(logits.shape[-1]), rows)
    return torch.bincount(tokens, minlength=logits.shape[-1]) / count


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 3.0, 3.0, 1.0]])
    assert largest_logits(logits, torch.nn.Identity(), None).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = torch.linspace(-2, 2, VOCAB)[torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))]
    expected = (logits / temperature).softmax(-1)
    assert (draws(logits, 4000, temperature=temperature) - expected).abs().max() < 0.03


def test_top_k_and_top_p_cut_the_tail() -> None:
    probabilities = torch.tensor([0.05, 0.5, 0.15, 0.3])
    logits = probabilities.log()
    by_k = draws(logits, 2000, temperature=1.0, top_k=2)
    assert (by_k - torch.tensor([0, 0.625, 0, 0.375])).abs().max() < 0.04
    # 0.5 alone does not reach 0.6, 0.5 + 0.3 does: the smallest such set is two tokens.
    by_p = draws(logits, 2000, temperature=1.0, top_p=0.6)
    assert (by_p - torch.tensor([0, 0.625, 0, 0.375])).abs().max() < 0.04
    assert draws(logits, 50, temperature=1.0, top_p=1e-6).tolist() == [0, 1, 0, 0]
    assert draws(logits, 50, temperature=1.0, top_k=1).tolist() == [0, 1, 0, 0]


def test_a_draw_does_not_depend_on_the_other_rows() -> None:
    logits = torch.randn(300, VOCAB, generator=torch.Generator().manual_seed(2))
    rows = [row_of(i % 9, seed=i, temperature=i % 4 * 0.7, top_k=i % 5, top_p=1 - (i % 4) / 5) for i in range(300)]
    together = sample(logits, Identity(), rows)
    alone = torch.cat([sample(logits[i : i + 1], Identity(), [row]) for i, row in enumerate(rows)])
    assert together.tolist() == alone.tolist()
    greedy = largest_logits(logits, torch.nn.Identity(), None)
    assert together[::4].tolist() == greedy[::4].tolist(), "their temperature is 0"
    assert together.tolist() != greedy.tolist()


def test_positions_draw_from_one_stream_each_its_own_number() -> None:
    logits = torch.zeros(64, 1000)
    tokens = sample(logits, Identity(1000), [row_of(place, seed=5, temperature=1.0) for place in range(64)])
    assert len(set(tokens.tolist())) > 55


def test_random_numbers_are_numpy_s_own() -> None:
    rng = np.random.default_rng(3)
    seeds = [0, 1, 2**64 - 1, *map(int, rng.integers(0, 2**63, 200))]
    positions = [0, 7, 2**31, *map(int, rng.integers(0, 100_000, 200))]
    expected = [
        np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
        for seed, position in zip(seeds, positions, strict=True)
    ]
    rows = [row_of(place, seed=seed) for seed, place in zip(seeds, positions, strict=True)]
    assert list_draws(rows, VOCAB)[:, 3].tolist() == expected


def test_a_step_of_many_rows_uses_what_steps_before_it_have_made(monkeypatch: pytest.MonkeyPatch) -> None:
    make, num_made = np.random.Philox, []
    monkeypatch.setattr(np.random, "Philox", lambda **which: num_made.append(which) or make(**which))
    rows = [row_of(seed=seed, temperature=1.0) for seed in range(9000)]
    for place in range(3):
        list_draws([(sequence, 1 + place) for sequence, _ in rows], VOCAB)
    assert len(num_made) == 9000


def test_nothing_is_kept_of_answered_requests() -> None:
    row = row_of(temperature=1.0, penalties=Penalties(repetition=2.0))
    sample(torch.zeros(1, VOCAB), Identity(), [row])
    prompt = weakref.ref(row[0].request.token_ids)
    del row
    assert prompt() is None
