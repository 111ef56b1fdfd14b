"""Draws follow the distribution that temperature, top-k and top-p leave, and depend on nothing but their own row."""

import numpy as np
import pytest
import torch

from engine import Request
from engine.execution.draws import DrawnRow, sample, uniform_numbers
from engine.kernels.draw import draw_tokens
from engine.kernels.torch_output_layer import largest_logits

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


def request(**parameters: float) -> Request:
    return Request(request_id="a", token_ids=[1], **parameters)


def answer_of(length: int) -> np.ndarray:
    """An answer so far, whose tokens do not matter."""
    return np.zeros(length, np.int32)


def draws(logits: torch.Tensor, count: int, **parameters: float) -> torch.Tensor:
    """How often each token was drawn, over `count` seeds."""
    requests = [request(seed=seed, **parameters) for seed in range(count)]
    drawn = [DrawnRow(row, each, answer_of(0)) for row, each in enumerate(requests)]
    tokens = sample(logits.expand(count, -1), Identity(logits.shape[-1]), drawn)
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
    requests = [request(seed=i, temperature=i % 4 * 0.7, top_k=i % 5, top_p=1 - (i % 4) / 5) for i in range(300)]
    drawn = [DrawnRow(i, each, answer_of(i % 9)) for i, each in enumerate(requests) if each.temperature]
    together = sample(logits, Identity(), drawn)
    alone = largest_logits(logits, torch.nn.Identity(), None)
    for each in drawn:
        alone[each.row] = sample(logits[each.row : each.row + 1], Identity(), [each._replace(row=0)])
    assert together.tolist() == alone.tolist()
    assert any(alone[each.row] != logits[each.row].argmax() for each in drawn)


def test_positions_draw_from_one_stream_each_its_own_number() -> None:
    logits = torch.zeros(64, 1000)
    drawn = [DrawnRow(row, request(seed=5, temperature=1.0), answer_of(row)) for row in range(64)]
    tokens = sample(logits, Identity(1000), drawn)
    assert len(set(tokens.tolist())) > 55


def test_random_numbers_are_numpy_s_own() -> None:
    rng = np.random.default_rng(3)
    seeds = [0, 1, 2**64 - 1, *map(int, rng.integers(0, 2**63, 200))]
    positions = [0, 7, 2**31, *map(int, rng.integers(0, 100_000, 200))]
    expected = [
        np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert uniform_numbers(seeds, positions).tolist() == expected
