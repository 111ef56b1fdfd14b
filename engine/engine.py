"""The engine: a model, its KV memory, and the loop that answers a whole plan."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import transformers

from engine.attention import make_attention
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.errors import ConfigError, RequestError
from engine.kv_cache import KVCache, free_memory_bytes
from engine.model import Model
from engine.output import Decoder, OutputProcessor
from engine.plan import PrefixGroup, plan_prefix_groups
from engine.request import Completion, Mode, Request
from engine.scheduled_group import schedule_groups
from engine.scheduler import Scheduler
from engine.sequence import most_extra_tokens
from engine.step_record import StepRecord

MOST_CPU_KV_BYTES = 4 * 1024**3
"""On a host, a KV budget of "auto" takes no more than this: other programs live there too."""


TOKENS_THAT_PAY_FOR_COMPILING = 100_000
"""Prompt tokens to compute from which "auto" compiles: about a minute's work on two CPU cores."""


class Engine:
    """One model on one device. Between calls it holds weights and unused KV memory, no other state.

    Made by `Engine.load`. Not thread-safe: one call at a time.
    """

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self.config = config
        self._model = model
        self._cache = KVCache(
            model.kv_shape,
            block_size=config.block_size,
            budget_bytes=_kv_budget_bytes(config, model.device),
            device=model.device,
        )
        self._backend = make_attention(
            config.attention,
            num_q_heads=model.num_q_heads,
            kv_shape=model.kv_shape,
            block_size=config.block_size,
            device=model.device,
        )

    @classmethod
    def load(cls, model: str | Path | transformers.PreTrainedModel, config: EngineConfig | None = None) -> "Engine":
        """Loads a checkpoint and takes its KV memory.

        Args:
            model: checkpoint folder, GGUF file, hub id, or a loaded causal LM (which is switched to our attention).
            config: defaults to `EngineConfig()`.
        Raises:
            ModelError: not readable, or not an architecture that is computed exactly.
            CapacityError: the KV budget holds no block.
        """
        config = config or EngineConfig()
        device = _device(config.device)
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        return cls(Model.load(model, dtype=_dtype(config.dtype, device), device=device), config)

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer, in tokens."""
        limit = self.config.max_model_len
        return self._model.max_positions if limit == "auto" else min(limit, self._model.max_positions)

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def num_kv_blocks(self) -> int:
        return self._cache.num_blocks

    def generate(self, requests: Sequence[Request], *, decode: Decoder | None = None) -> list[Completion]:
        """Answers requests of mode "generate"; results in input order.

        Args:
            requests: in any order; request_ids are unique.
            decode: needed where a request has stop strings.
        Raises:
            RequestError: a request is impossible; raised before any work starts.
        """
        return self._answer_all(requests, "generate", decode)

    def score(self, requests: Sequence[Request]) -> list[Completion]:
        """Answers requests of mode "score"; results in input order.

        Raises:
            RequestError: a request is impossible; raised before any work starts.
        """
        return self._answer_all(requests, "score", None)

    def run_plan(
        self,
        requests: Sequence[Request],
        groups: Sequence[PrefixGroup],
        *,
        decode: Decoder | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> Iterator[Completion]:
        """Answers a plan, group by group; completions come as they are ready, in any order.

        An impossible request yields a completion with an error, before the work on the others starts.

        Args:
            requests: both modes may be mixed.
            groups: their members' request_indices point into `requests`; each request is in one group.
            decode: needed where a request has stop strings.
            on_step: called after each step.
        """
        impossible = {
            index: reason
            for index, request in enumerate(requests)
            if (reason := self._why_impossible(request, decode)) is not None
        }
        for index, reason in impossible.items():
            request = requests[index]
            yield Completion(
                request_id=request.request_id,
                finish_reason="error",
                num_prompt_tokens=len(request.token_ids),
                error=reason,
            )
        block_size = self._cache.block_size
        pool = BlockPool(self._cache.num_blocks)
        scheduler = Scheduler(
            schedule_groups(requests, groups, impossible, block_size),
            pool=pool,
            block_size=block_size,
            chunk_tokens=self.config.chunk_tokens,
            output_reserve=self.config.output_reserve,
        )
        if self._pays_to_compile(groups):
            self._model.compile_layers()
        outputs = OutputProcessor(requests, self._model, scheduler, decode)
        number, started = 0, time.perf_counter()
        while not (step := scheduler.next_step()).is_empty:
            num_blocks_used = pool.num_used
            batch, owners = step.lay_out(block_size)
            hidden = self._model.forward(batch, self._cache, self._backend)
            scheduler.complete_step(step)
            completions = list(outputs.process(hidden, owners))
            ended = time.perf_counter()
            if on_step is not None:
                on_step(
                    StepRecord(
                        step=number,
                        num_decode_tokens=sum(count for _, count in step.decodes),
                        num_suffix_tokens=sum(count for _, count in step.suffixes),
                        num_prefix_tokens=sum(step.prefixes.values()),
                        num_kv_blocks_used=num_blocks_used,
                        num_kv_blocks_total=pool.num_blocks,
                        num_running_requests=scheduler.num_running,
                        num_waiting_requests=scheduler.num_unfinished - scheduler.num_running,
                        num_finished_requests=len(completions),
                        num_preempted_requests=step.num_preempted,
                        duration_ms=(ended - started) * 1e3,
                    )
                )
            number, started = number + 1, ended
            yield from completions
        assert pool.num_used == 0, f"{pool.num_used} KV blocks are still held after the last request"

    def _pays_to_compile(self, groups: Sequence[PrefixGroup]) -> bool:
        if self.config.compile != "auto":
            return self.config.compile == "always"
        is_long = sum(group.num_tokens for group in groups) >= TOKENS_THAT_PAY_FOR_COMPILING
        return is_long and self._model.dtype != torch.float32 and _has_compiler()

    def _answer_all(self, requests: Sequence[Request], mode: Mode, decode: Decoder | None) -> list[Completion]:
        seen: set[str] = set()
        for request in requests:
            if request.request_id in seen:
                raise RequestError(f"request {request.request_id!r}: the request_id is used twice in one call")
            seen.add(request.request_id)
            reason = self._why_impossible(request, decode)
            if request.mode != mode:
                reason = f"mode is {request.mode!r}, expected {mode!r} here"
            if reason is not None:
                raise RequestError(f"request {request.request_id!r}: {reason}")
        groups = plan_prefix_groups([request.token_ids for request in requests])
        answers = {answer.request_id: answer for answer in self.run_plan(requests, groups, decode=decode)}
        return [answers[request.request_id] for request in requests]

    def _why_impossible(self, request: Request, decode: Decoder | None) -> str | None:
        """Why a request cannot be answered even alone; None where it can."""
        num_prompt_tokens = len(request.token_ids)
        largest = max(int(request.token_ids.max()), *(max(label) for label in request.labels), 0)
        if largest >= self.vocab_size:
            return f"token id {largest} is not below the vocabulary size {self.vocab_size}"
        if any(token < 0 for label in request.labels for token in label):
            return f"label token ids must not be negative, got {request.labels}"
        num_tokens = num_prompt_tokens + most_extra_tokens(request) + 1
        if num_tokens > self.max_model_len:
            return (
                f"the prompt has {num_prompt_tokens} tokens, with {num_tokens - num_prompt_tokens} for the answer "
                f"{num_tokens}, which exceeds the context of {self.max_model_len}"
            )
        # A prefix and the own part are rounded up to blocks apart: one block more than for the whole.
        num_blocks = -(-num_tokens // self._cache.block_size) + 1
        if num_blocks > self._cache.num_blocks:
            return (
                f"{num_tokens} tokens need up to {num_blocks} KV blocks of {self._cache.block_size} tokens, "
                f"the memory budget holds {self._cache.num_blocks}"
            )
        if request.stop and decode is None:
            return "stop strings need the caller's decoder: pass decode="
        return None


def _has_compiler() -> bool:
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known to torch") from error


def _kv_budget_bytes(config: EngineConfig, device: torch.device) -> int:
    if config.kv_memory_bytes != "auto":
        return config.kv_memory_bytes
    budget_bytes = int(config.memory_fraction * free_memory_bytes(device))
    return min(budget_bytes, MOST_CPU_KV_BYTES) if device.type == "cpu" else budget_bytes


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    is_native = torch.cpu._is_avx512_bf16_supported() if device.type == "cpu" else torch.cuda.is_bf16_supported()
    return torch.bfloat16 if is_native else torch.float32
