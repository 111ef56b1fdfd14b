"""batchloom behind the benchmark's protocol."""

import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from tokenizers import Tokenizer

from benchmarks.peers.protocol import Answers, Loaded, LoadSettings, Work, serve
from engine.completion import Completion
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.step_record import StepRecord
from engine.planning.prefix_groups import plan_prefix_groups
from engine.request import Request

if TYPE_CHECKING:
    from engine.grammar import Grammar


class BatchloomEngine:
    """Plans each run; the time of planning counts."""

    def __init__(self, attention: str = "auto") -> None:
        self._attention = attention

    @classmethod
    def around(cls, engine: Engine) -> "BatchloomEngine":
        """Wraps an engine that this process has loaded."""
        made = cls()
        made._engine = engine
        return made

    def load(self, settings: LoadSettings) -> Loaded:
        """Options are fields of `EngineConfig`."""
        config = {
            "dtype": settings.dtype,
            "device": settings.device,
            "attention": self._attention,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "kv_memory_bytes": settings.kv_bytes,
            "num_threads": settings.num_threads,
        }
        self._engine = Engine.load(Path(settings.model), EngineConfig(**(config | settings.options)))
        self._tokenizer = Path(settings.model) / "tokenizer.json"
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        return Loaded(versions=versions, details={"kv_blocks": self._engine.num_kv_blocks})

    @cache  # noqa: B019 - one engine a process
    def _grammar(self, schema: str) -> "Grammar":
        from engine.grammar import Grammar, Vocabulary  # imported only when needed

        tokenizer = Tokenizer.from_file(str(self._tokenizer))
        engine = self._engine
        vocabulary = Vocabulary(tokenizer, vocab_size=engine.vocab_size, eos_token_ids=engine.eos_token_ids)
        return Grammar.from_json_schema(schema, vocabulary)

    def run(self, work: Work) -> Answers:
        steps: list[StepRecord] = []
        started = time.perf_counter()
        labels = tuple((label,) for label in work.labels)
        requests = [
            Request(request_id=str(index), token_ids=token_ids, mode="score", labels=labels)
            if labels
            else Request(
                request_id=str(index),
                token_ids=token_ids,
                max_new_tokens=work.num_output_tokens,
                ignore_eos=not work.schema,
                grammar=self._grammar(work.schema) if work.schema else None,
            )
            for index, token_ids in enumerate(work.token_ids)
        ]
        block_size = self._engine.config.shared_block_size
        groups = plan_prefix_groups([request.token_ids for request in requests], block_size=block_size)
        planned = time.perf_counter()
        answers: dict[str, Completion] = {
            answer.request_id: answer for answer in self._engine.run_plan(requests, groups, on_step=steps.append)
        }
        seconds = time.perf_counter() - started
        for answer in answers.values():
            if answer.error is not None:
                raise RuntimeError(f"request {answer.request_id}: {answer.error}")
        in_order = [answers[request.request_id] for request in requests]
        return Answers(
            token_ids=[[int(token) for token in answer.token_ids] for answer in in_order],
            label_logprobs=[list(answer.label_logprobs) for answer in in_order] if labels else [],
            seconds=seconds,
            num_computed_tokens=sum(step.num_tokens for step in steps),
            details={
                "plan_seconds": planned - started,
                "model_seconds": sum(step.duration_ms for step in steps) / 1e3,
                "num_steps": len(steps),
                "num_preempted": sum(step.num_preempted_requests for step in steps),
                "num_cached_tokens": sum(answer.num_cached_tokens for answer in in_order),
                "peak_kv_share": max(step.num_kv_blocks_used / step.num_kv_blocks_total for step in steps),
            },
        )


if __name__ == "__main__":
    serve(BatchloomEngine(*sys.argv[1:]))
