"""Sampling of rows whose next token is drawn from their request's own random stream."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.device.transfers import to_device
from engine.kernels.output_layer import ROWS_AT_ONCE
from engine.kernels.torch_output_layer import mask_logits
from engine.model.model import Model
from engine.request import Request
from engine.scheduling.step import Step

Words = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


class DrawnRow(NamedTuple):
    """A row whose token is drawn: its index, its request, and the number of tokens that the answer has so far."""

    row: int
    request: Request
    position: int


def drawn_rows(step: Step) -> list[DrawnRow]:
    """Of the step's sampled rows, those of requests with a temperature above 0."""
    return [
        DrawnRow(row, sequence.request, place - sequence.num_suffix)
        for row, (sequence, place) in enumerate(step.sampled)
        if sequence.request.temperature
    ]


@torch.inference_mode()
def sample(
    hidden: torch.Tensor, model: Model, drawn: Sequence[DrawnRow], allowed: torch.Tensor | None = None
) -> torch.Tensor:
    """One token for each row, int64 ``[R]``: a draw for the rows in `drawn`, the most likely token for the others.

    A draw depends only on the row's logits, the request's seed and the position in its answer: not on other rows, and
    not on preemptions.

    Args:
        hidden: ``[R, hidden]`` last hidden states.
        drawn: in ascending order.
        allowed: see `OutputLayer.most_likely`.
    """
    rows = np.array([each.row for each in drawn], dtype=np.int64)
    greedy = to_device(np.delete(np.arange(len(hidden)), rows), hidden.device)
    masks = None if allowed is None else allowed.index_select(0, greedy)
    chosen = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
    chosen.index_copy_(0, greedy, model.most_likely(hidden.index_select(0, greedy), masks))
    for first in range(0, len(drawn), ROWS_AT_ONCE):
        _, requests, positions = zip(*drawn[first : first + ROWS_AT_ONCE], strict=True)
        index = to_device(rows[first : first + ROWS_AT_ONCE], hidden.device)
        masks = None if allowed is None else allowed.index_select(0, index)
        draws = to_device(list_draws(requests, positions, model.vocab_size), hidden.device)
        logits = model.logits(hidden.index_select(0, index))
        chosen.index_copy_(0, index, model.draw_tokens(logits if masks is None else mask_logits(logits, masks), draws))
    return chosen


def list_draws(requests: Sequence[Request], positions: Sequence[int], vocab_size: int) -> npt.NDArray[np.float64]:
    """The settings and random numbers of draws, as `engine.kernels.draw.draw_tokens` takes them; made on the host, so
    that they do not depend on the device.

    Args:
        requests, positions: of each row, its request and the number of tokens that the answer has so far.
    """
    temperature, top_p, seeds = zip(*((each.temperature, each.top_p, each.seed) for each in requests), strict=True)
    top_k = [min(request.top_k or vocab_size, vocab_size) for request in requests]
    return np.stack([temperature, top_k, top_p, uniform_numbers(seeds, positions)], axis=1)


def uniform_numbers(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """For each seed, below 2**64, the number in [0, 1) at its position of the seed's stream: float64 ``[n]``.

    The generator is Philox 4x64 with ten rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"),
    with the seed as key and the position as counter: the first number of ``numpy.random.Philox(key, counter)``."""
    zeros = np.zeros(len(seeds), dtype=np.uint64)
    keys = [np.array(seeds, dtype=np.uint64), zeros]
    words = [np.array(positions, dtype=np.uint64) + np.uint64(1), zeros, zeros, zeros]
    for _ in range(_ROUNDS):
        (high_0, low_0), (high_1, low_1) = (
            _multiply(word, np.uint64(factor)) for word, factor in zip((words[0], words[2]), _MULTIPLIERS, strict=True)
        )
        words = [high_1 ^ words[1] ^ keys[0], low_1, high_0 ^ words[3] ^ keys[1], low_0]
        keys = [key + np.uint64(step) for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return (words[0] >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _multiply(words: Words, factor: np.uint64) -> tuple[Words, Words]:
    """High and low 64 bits of 64-bit by 64-bit products."""
    word_high, word_low = words >> _HALF, words & _LOW
    factor_high, factor_low = factor >> _HALF, factor & _LOW
    middle = word_high * factor_low + (word_low * factor_low >> _HALF)
    carried = word_low * factor_high + (middle & _LOW)
    return word_high * factor_high + (middle >> _HALF) + (carried >> _HALF), words * factor
