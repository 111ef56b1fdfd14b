"""Sampling of rows whose next token is drawn from their request's own random stream, or has penalties."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.device.transfers import to_device
from engine.kernels.output_layer import ROWS_AT_ONCE
from engine.kernels.torch_output_layer import mask_logits
from engine.model.model import Model
from engine.request import Request
from engine.scheduling.step import Step

_CHUNK = 64
"""Numbers of a seed that are made at once."""

_Places = npt.NDArray[np.int64]
_Amounts = npt.NDArray[np.float32]


class DrawnRow(NamedTuple):
    """A row whose token is drawn, or penalised: its index, its request, and the tokens of the answer so far."""

    row: int
    request: Request
    answer: npt.NDArray[np.int32]


def drawn_rows(step: Step) -> list[DrawnRow]:
    """Of the step's sampled rows, those of requests with a temperature above 0 or penalties."""
    return [
        DrawnRow(row, sequence.request, sequence.own_token_ids[sequence.num_suffix : place])
        for row, (sequence, place) in enumerate(step.sampled)
        if sequence.request.temperature or sequence.request.penalties
    ]


@torch.inference_mode()
def sample(
    hidden: torch.Tensor, model: Model, drawn: Sequence[DrawnRow], allowed: torch.Tensor | None = None
) -> torch.Tensor:
    """One token for each row, int64 ``[R]``: a draw for the rows in `drawn`, the most likely token for the others, and
    where a drawn row's temperature is 0.

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
        _, requests, answers = zip(*drawn[first : first + ROWS_AT_ONCE], strict=True)
        index = to_device(rows[first : first + ROWS_AT_ONCE], hidden.device)
        masks = None if allowed is None else allowed.index_select(0, index)
        draws = to_device(list_draws(requests, list(map(len, answers)), model.vocab_size), hidden.device)
        logits = model.logits(hidden.index_select(0, index))
        if any(request.penalties is not None for request in requests):
            penalise(logits, requests, answers)
        chosen.index_copy_(0, index, model.draw_tokens(logits if masks is None else mask_logits(logits, masks), draws))
    return chosen


def penalise(logits: torch.Tensor, requests: Sequence[Request], answers: Sequence[npt.NDArray[np.int32]]) -> None:
    """Lowers the logits of rows whose request has penalties, in place.

    Args:
        logits: float32 ``[R, vocab_size]``, contiguous.
        requests, answers: of each row, its request, and the tokens of its answer so far, int32 ``[n]``.
    """
    repeated, factors, answered, amounts = list[_Places](), list[_Amounts](), list[_Places](), list[_Amounts]()
    for row, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        if (penalties := request.penalties) is not None:
            tokens, counts = np.unique(answer, return_counts=True)
            # A token of both is there twice, and gets the same value twice.
            repeated.append(row * logits.shape[-1] + np.concatenate([_prompt_tokens(request), tokens]))
            factors.append(np.full(len(repeated[-1]), penalties.repetition, np.float32))
            answered.append(row * logits.shape[-1] + tokens.astype(np.int64))
            amounts.append((penalties.presence + penalties.frequency * counts).astype(np.float32))
    values, places, own_places = logits.view(-1), _to_device(repeated, logits), _to_device(answered, logits)
    found, factor = values[places], _to_device(factors, logits)
    values[places] = torch.where(found < 0, found * factor, found / factor)
    values[own_places] -= _to_device(amounts, logits)


def _to_device(arrays: Sequence[npt.NDArray[Any]], logits: torch.Tensor) -> torch.Tensor:
    return to_device(np.concatenate(arrays), logits.device)


@lru_cache(maxsize=4096)
def _prompt_tokens(request: Request) -> _Places:
    """The distinct tokens of its prompt, in ascending order."""
    return np.unique(request.token_ids).astype(np.int64)


def list_draws(requests: Sequence[Request], positions: Sequence[int], vocab_size: int) -> npt.NDArray[np.float64]:
    """The settings and random numbers of draws, as `engine.kernels.draw.draw_tokens` takes them; made on the host, so
    that they do not depend on the device.

    Args:
        requests, positions: of each row, its request and the number of tokens that the answer has so far.
    """
    temperature, top_p, seeds = zip(*((each.temperature or 1, each.top_p, each.seed) for each in requests), strict=True)
    top_k = [min(request.top_k or vocab_size, vocab_size) if request.temperature else 1 for request in requests]
    return np.stack([temperature, top_k, top_p, uniform_numbers(seeds, positions)], axis=1)


def uniform_numbers(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """For each seed, below 2**64, the number in [0, 1) at its position of the seed's stream: float64 ``[n]``.

    It is the first number of ``numpy.random.Philox(key=seed, counter=position)`` (Salmon et al. 2011, "Parallel random
    numbers: as easy as 1, 2, 3"); the generator makes four words for each value of its counter."""
    return np.array([_chunk(seed, at // _CHUNK)[at % _CHUNK] for seed, at in zip(seeds, positions, strict=True)])


@lru_cache(maxsize=8192)
def _chunk(seed: int, index: int) -> tuple[float, ...]:
    """The numbers at positions [index * _CHUNK, (index + 1) * _CHUNK) of a seed's stream."""
    words = np.random.Philox(key=seed, counter=index * _CHUNK).random_raw(4 * _CHUNK)[::4]
    return tuple(((words >> np.uint64(11)) * 2.0**-53).tolist())
