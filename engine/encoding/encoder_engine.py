"""The engine for encoders: distinct texts are packed into steps up to a token budget, longest first."""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequences
from pathlib import Path

import numpy as np

from engine.completion import Completion
from engine.config import EngineConfig
from engine.device.placement import find_dtype, resolve_device, use_device, use_threads
from engine.device.transfers import to_device
from engine.encoding.encoder import Encoder
from engine.encoding.families import find_longest_text
from engine.errors import COMPUTED_NAN, ConfigError, ModelError
from engine.execution.batch_calls import BatchCalls
from engine.execution.output import complete
from engine.execution.step_record import StepRecord
from engine.model.adapters.adapter import Adapter
from engine.model.loading.checkpoint import resolve_checkpoint
from engine.planning.group import PrefixGroup
from engine.pooling.pooler import Vector, why_too_many
from engine.request import POOLED_MODES, Mode, Request
from engine.scheduling.policies.sharing import check_groups, owners_by_answer
from engine.scheduling.sequence import Sequence


class EncoderEngine(BatchCalls):
    """One encoder on one device, with the calls of `engine.engine.Engine` that apply to encoders. Made by
    `EncoderEngine.load`. Not thread-safe: one call at a time.

    Args:
        config: settings of KV memory, decoding and sharing have no effect, nor has `deterministic`.
        max_positions: longest text that the checkpoint's positions allow, in tokens.
        adapter: in the weights; None: the base alone.
    """

    def __init__(
        self, encoder: Encoder, config: EngineConfig, max_positions: int, adapter: Adapter | None = None
    ) -> None:
        self.config = config
        self.adapter = adapter
        self._encoder = encoder
        limit = config.max_model_len
        self.max_model_len = max_positions if limit == "auto" else min(limit, max_positions)

    @classmethod
    def load(
        cls, model: str | Path, config: EngineConfig | None = None, *, adapter: Adapter | None = None
    ) -> "EncoderEngine":
        """Loads a checkpoint.

        Args:
            model: checkpoint folder or hub id.
        Raises:
            ConfigError: tensor_parallel_size is above 1, or the format is fp8 or int8.
            ModelError: not readable, or not an encoder that is computed exactly.
        """
        config = EngineConfig() if config is None else config
        if not isinstance(config, EngineConfig):
            raise ConfigError(f"config must be an EngineConfig, got {config!r}")
        if not isinstance(model, str | Path):
            raise ModelError(f"model must be the path of a checkpoint folder or a hub id, got {model!r}")
        if config.tensor_parallel_size > 1:
            raise ConfigError(f"tensor_parallel_size {config.tensor_parallel_size} is for decoders, this is an encoder")
        if config.dtype in ("fp8", "int8"):
            raise ConfigError(f"dtype {config.dtype!r} is for decoders, this is an encoder")
        folder = resolve_checkpoint(model)
        device = use_device(resolve_device(config.device))
        use_threads(config.num_threads)
        encoder = Encoder.load(folder, dtype=find_dtype(config.dtype, device), device=device, adapter=adapter)
        return cls(encoder, config, find_longest_text(folder), adapter)

    is_usable = True
    """See `Engine.is_usable`."""

    def run_plan(
        self,
        requests: Sequences[Request],
        groups: Sequences[PrefixGroup],
        *,
        decode: object = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> Iterator[Completion]:
        """Answers requests; completions come step by step, the longest texts first.

        An impossible request yields a completion with an error, before the work on the others starts.

        Args:
            groups: their members say which requests have the same text; a prefix is not shared.
            decode: not used: there is nothing to decode.
            on_step: see `Engine.run_plan`.
        Raises:
            ConfigError: on_step is not a function.
            FloatingPointError: a vector has NaN.
            ModelError: the checkpoint does not answer requests of one of the modes.
            RequestError: a request is not in one group, or its group has another prompt.
        """
        if not (on_step is None or callable(on_step)):
            raise ConfigError(f"on_step must be a function of step records, got {on_step!r}")
        use_device(self._encoder.device)
        for mode in {request.mode for request in requests}:
            if mode not in POOLED_MODES:
                raise ModelError(f"mode is {mode!r}, and an encoder answers {' and '.join(map(repr, POOLED_MODES))}")
            self._encoder.find_pooler(mode)
        check_groups(requests, groups)
        reasons = [self.why_impossible(request) for request in requests]
        impossible = {index: reason for index, reason in enumerate(reasons) if reason is not None}
        for index, reason in impossible.items():
            yield Completion.refuse(requests[index].request_id, len(requests[index].token_ids), reason)
        texts = [
            Sequence(request=requests[owners[0]], owners=owners, node=None)
            for group in groups
            for member in group.members
            for owners in owners_by_answer(requests, member.request_indices, impossible)
        ]
        texts.sort(key=lambda text: (_kind(text), text.num_suffix), reverse=True)
        num_left = sum(len(text.owners) for text in texts)
        for number, step in enumerate(_pack(texts, self.config.step_tokens)):
            started = time.perf_counter()
            vectors = self._compute(step)
            duration_ms = (time.perf_counter() - started) * 1e3
            num_tokens = sum(text.num_suffix for text in step)
            num_finished = sum(len(text.owners) for text in step)
            num_left -= num_finished
            for text, vector in zip(step, vectors, strict=True):
                text.vector, text.num_reused, text.finish_reason = vector, 0, "scored"
                text.compute_ms = duration_ms * text.num_suffix / num_tokens
                yield from complete(text, requests)
            if on_step is not None:
                record = StepRecord(
                    step=number,
                    num_suffix_tokens=num_tokens,
                    num_waiting_requests=num_left,
                    num_finished_requests=num_finished,
                    duration_ms=duration_ms,
                )
                on_step(record)

    def _compute(self, texts: Sequences[Sequence]) -> Vector:
        """Pooled vectors ``[n, k]`` of texts of one kind; `FloatingPointError` where one has NaN."""
        request, token_ids = texts[0].request, [text.request.token_ids for text in texts]
        hidden = self._encoder.forward(token_ids, request.pair_separator)
        lengths = to_device(np.array([len(text) for text in token_ids]), hidden.device)
        vectors: Vector = self._encoder.find_pooler(request.mode)(hidden, lengths).cpu().numpy()
        if np.isnan(vectors).any():
            raise FloatingPointError(COMPUTED_NAN)
        return vectors

    def why_impossible(self, request: Request, *, can_decode: bool = False) -> str | None:
        largest, num_tokens = int(request.token_ids.max()), len(request.token_ids)
        if largest >= self._encoder.vocab_size:
            return f"token id {largest} is not below the vocabulary size {self._encoder.vocab_size}"
        if num_tokens > self.max_model_len:
            return f"the prompt has {num_tokens} tokens, which exceeds the context of {self.max_model_len}"
        return None if request.dimensions is None else why_too_many(request, self._encoder.find_pooler("embed"))


def _kind(text: Sequence) -> tuple[Mode, int]:
    """Texts of one kind may be computed together."""
    separator = text.request.pair_separator
    return text.request.mode, -1 if separator is None else separator


def _pack(texts: Sequences[Sequence], max_tokens: int) -> Iterator[list[Sequence]]:
    """Steps of neighbours of one kind with at most max_tokens together; a longer text is a step of its own."""
    step: list[Sequence] = []
    num_tokens = 0
    for text in texts:
        num_more = text.num_suffix
        if step and (num_tokens + num_more > max_tokens or _kind(text) != _kind(step[0])):
            yield step
            step, num_tokens = [], 0
        step.append(text)
        num_tokens += num_more
    if step:
        yield step
