"""Sampling of rows whose next token is drawn from their request's own random stream, or has penalties."""

from collections.abc import Sequence as Sequences
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.device.transfers import to_device
from engine.kernels.output_layer import ROWS_AT_ONCE
from engine.kernels.torch_output_layer import mask_logits
from engine.model.model import Model
from engine.request import Request
from engine.scheduling.sequence import Sequence

_CHUNK = 64
"""Numbers of a seed that are made at once."""

_Places = npt.NDArray[np.int64]
_Amounts = npt.NDArray[np.float32]

_Sampled = Sequences[tuple[Sequence, int]]
"""Of each row, its sequence and the index of the own token that is predicted, as in `Step.sampled`."""


class AnswerDraws:
    """What the rows of one answer use step after step. It is kept in `Sequence.draws`, so it goes with the sequence."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._chunk, self._numbers = -1, list[float]()

    @cached_property
    def prompt_tokens(self) -> _Places:
        """The distinct tokens of the prompt, in ascending order."""
        return np.unique(self._request.token_ids).astype(np.int64)

    def uniform_number(self, position: int) -> float:
        """The number in [0, 1) at this position of the answer, from the stream of the request's seed.

        It is the first number of ``numpy.random.Philox(key=seed, counter=position)`` (Salmon et al. 2011, "Parallel
        random numbers: as easy as 1, 2, 3"); the generator makes four words for each value of its counter."""
        chunk = position // _CHUNK
        if chunk != self._chunk:
            words = np.random.Philox(key=self._request.seed, counter=chunk * _CHUNK).random_raw(4 * _CHUNK)[::4]
            self._chunk, self._numbers = chunk, ((words >> np.uint64(11)) * 2.0**-53).tolist()
        return self._numbers[position % _CHUNK]


@torch.inference_mode()
def sample(hidden: torch.Tensor, model: Model, sampled: _Sampled, allowed: torch.Tensor | None = None) -> torch.Tensor:
    """One token for each row, int64 ``[R]``: a draw where the request's temperature is above 0, else the most likely
    token; of logits that the request's penalties have lowered.

    A draw depends only on the row's logits, the request's seed and the position in its answer: not on other rows, and
    not on preemptions.

    Args:
        hidden: ``[R, hidden]`` last hidden states.
        sampled: see `Step.sampled`.
        allowed: see `OutputLayer.most_likely`.
    """
    drawn = [row for row, (each, _) in enumerate(sampled) if each.request.temperature or each.request.penalties]
    greedy = to_device(np.delete(np.arange(len(hidden)), drawn), hidden.device)
    masks = None if allowed is None else allowed.index_select(0, greedy)
    chosen = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
    chosen.index_copy_(0, greedy, model.most_likely(hidden.index_select(0, greedy), masks))
    for first in range(0, len(drawn), ROWS_AT_ONCE):
        rows = drawn[first : first + ROWS_AT_ONCE]
        work = [sampled[row] for row in rows]
        index = to_device(np.array(rows), hidden.device)
        masks = None if allowed is None else allowed.index_select(0, index)
        draws = to_device(list_draws(work, model.vocab_size), hidden.device)
        logits = model.logits(hidden.index_select(0, index))
        if any(sequence.request.penalties is not None for sequence, _ in work):
            penalise(logits, work)
        chosen.index_copy_(0, index, model.draw_tokens(logits if masks is None else mask_logits(logits, masks), draws))
    return chosen


def penalise(logits: torch.Tensor, sampled: _Sampled) -> None:
    """Lowers the logits of rows whose request has penalties, in place.

    Args:
        logits: float32 ``[R, vocab_size]``, contiguous.
        sampled: as `Step.sampled`, of these rows; the tokens before the predicted ones are known.
    """
    repeated, factors, answered, amounts = list[_Places](), list[_Amounts](), list[_Places](), list[_Amounts]()
    for row, (sequence, place) in enumerate(sampled):
        if (penalties := sequence.request.penalties) is not None:
            tokens, counts = np.unique(sequence.own_token_ids[sequence.num_suffix : place], return_counts=True)
            # A token of both is there twice, and gets the same value twice.
            both = np.concatenate([_draws_of(sequence).prompt_tokens, tokens])
            repeated.append(row * logits.shape[-1] + both)
            factors.append(np.full(len(both), penalties.repetition, np.float32))
            answered.append(row * logits.shape[-1] + tokens.astype(np.int64))
            amounts.append((penalties.presence + penalties.frequency * counts).astype(np.float32))
    values, places, own_places = logits.view(-1), _to_device(repeated, logits), _to_device(answered, logits)
    found, factor = values[places], _to_device(factors, logits)
    values[places] = torch.where(found < 0, found * factor, found / factor)
    values[own_places] -= _to_device(amounts, logits)


def _to_device(arrays: Sequences[npt.NDArray[Any]], logits: torch.Tensor) -> torch.Tensor:
    return to_device(np.concatenate(arrays), logits.device)


def list_draws(sampled: _Sampled, vocab_size: int) -> npt.NDArray[np.float64]:
    """The settings and random numbers of rows, float64 ``[R, 4]`` as `engine.kernels.draw.draw_tokens` takes them; made
    on the host, so that they do not depend on the device. `sampled` is as `Step.sampled`."""
    requests = [sequence.request for sequence, _ in sampled]
    draws = np.empty((len(sampled), 4))
    draws[:, 0] = [request.temperature or 1 for request in requests]
    draws[:, 1] = [min(each.top_k or vocab_size, vocab_size) if each.temperature else 1 for each in requests]
    draws[:, 2] = [request.top_p for request in requests]
    draws[:, 3] = [_draws_of(each).uniform_number(place - each.num_suffix) for each, place in sampled]
    return draws


def _draws_of(sequence: Sequence) -> AnswerDraws:
    if not isinstance(sequence.draws, AnswerDraws):
        sequence.draws = AnswerDraws(sequence.request)
    return sequence.draws
