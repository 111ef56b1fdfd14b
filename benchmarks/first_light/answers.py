"""Compares the engine's answers with transformers' float32 logits, by number format and by policy."""

import gc
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch

from benchmarks.measuring.correctness import NEAR_TIE
from benchmarks.measuring.wrong_answer import WrongAnswerError
from benchmarks.peers.judge_engine import JudgeEngine
from benchmarks.peers.protocol import LoadSettings
from engine.config import EngineConfig
from engine.device.gpu import find_fp8
from engine.engine import Engine
from engine.errors import ConfigError
from engine.execution.step_record import StepRecord
from engine.planning.prefix_groups import plan_prefix_groups
from engine.request import Request

MOST_GAP = {"float32": NEAR_TIE, "bfloat16": 0.3, "fp8": 2.0}
"""By dtype, the largest distance of a token from the best float32 logit; these models' logits have a deviation of 1."""

DRAWN = {"temperature": 0.7, "top_k": 1}
"""Draws of the most likely token alone."""

FEW_TOKENS = 640
"""KV memory in which requests are preempted: a few of the prompts fit until they grow."""


def policies(kv_bytes_per_token: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Settings that take other ways over the device and change no answer, by name.

    A server's steps are short, since its cache has nothing for prompts that start in one step.
    """
    yield "found memory", {"kv_memory_bytes": "auto", "memory_fraction": 0.5}
    yield "lookup", {"prompt_lookup": "always"}
    yield "relay", {"attention": "relay"}
    yield "server", {"attention": "paged", "sharing": "lru", "order": "fcfs", "max_num_batched_tokens": 128}
    yield "swap", {
        "preemption": "swap", "output_reserve": 0.0, "kv_memory_bytes": FEW_TOKENS * kv_bytes_per_token,
    }  # fmt: skip
    yield "two processes", {"disaggregation": "processes"}


WAYS = {"preemption": "num_swapped_blocks"}
"""By setting, the count that is not 0 where the run went the way that the setting names. Guesses of prompt lookup are
counted but not required: how many a step has room for depends on the device."""


class Answering:
    """The engine on one checkpoint and one list of prompts.

    Args:
        folder: the checkpoint's.
        device: "cpu": in Triton's interpreter.
        vocab_size: of the checkpoint.
    """

    def __init__(self, folder: str, device: str, vocab_size: int) -> None:
        self._folder = folder
        self._device = device
        self._is_tiny = device == "cpu"
        self._prompts = _prompts(vocab_size, 2 if self._is_tiny else 24)
        self._num_new = 2 if self._is_tiny else 16
        self._num_repeats = 1 if self._is_tiny else 3  # CUDA graphs are captured in the second run

    def judge(self, dtype: str, drawn: Mapping[str, Any] | None = None, **settings: Any) -> dict[str, float] | str:
        """Compare each token of the engine's answers with transformers' logits in float32.

        Args:
            dtype: of the engine; see `MOST_GAP`.
            drawn: how requests draw tokens; None: they are greedy.
            settings: of the engine.
        Returns:
            what is known of the answers, or why the device has no such dtype.
        Raises:
            WrongAnswerError: a token's logit is further from the best than the dtype explains, or the answers say
                nothing of shared prefixes or of a way that the settings name.
        """
        if dtype == "fp8":
            try:
                find_fp8(torch.device(self._device))
            except ConfigError as error:
                return f"not run: {error}"
        answers, counts = self._generate(self._engine(dtype, **settings), drawn)
        needed = ["num_cached_tokens", *(count for setting, count in WAYS.items() if setting in settings)]
        if missing := [name for name in needed if not (counts[name] or self._is_tiny)]:
            raise WrongAnswerError(f"the run did not go the way that it checks: {', '.join(missing)} is 0")
        gaps = self._judge.token_gaps({"prompts": self._prompts, "answers": answers})["gaps"]
        largest = float(np.max(gaps))
        if not largest <= MOST_GAP[dtype]:
            raise WrongAnswerError(f"a token is {largest:.3g} below the best logit, at most {MOST_GAP[dtype]} is right")
        num_greedy = sum(max(found) == 0 for found in gaps)
        return {"num_answers": len(answers), "num_greedy": num_greedy, "largest_gap": largest} | counts

    def with_graphs(self) -> dict[str, Any]:
        """Check that answers are the same with and without CUDA graphs.

        Raises:
            WrongAnswerError: they differ, or a GPU captured no graph.
        """
        plain, _ = self._generate(self._engine("float32", cuda_graphs="never"))
        engine = self._engine("float32")
        self._require_same(engine, plain, "with CUDA graphs")
        found = graph_figures(engine)
        if not (self._is_tiny or found["num_graphs"]):
            raise WrongAnswerError("no CUDA graph was captured")
        return {"num_answers": len(plain)} | found

    def two_ranks(self) -> str:
        """Check that a model on two devices gives the answers of one device, with and without graphs.

        Raises:
            WrongAnswerError: they differ.
        """
        if not self._is_tiny and torch.cuda.device_count() < 2:
            return "not run: there is one GPU"
        attention = "torch" if self._is_tiny else "fused"
        plain, _ = self._generate(self._engine("float32", attention=attention))
        for graphs in ("never", "auto")[: 1 if self._is_tiny else 2]:
            engine = self._engine("float32", attention=attention, tensor_parallel_size=2, cuda_graphs=graphs)
            self._require_same(engine, plain, f"of two ranks, graphs {graphs}")
            del engine
            gc.collect()
        return "the same answers"

    @cached_property
    def _judge(self) -> JudgeEngine:
        """transformers' model, loaded once for all comparisons."""
        judge = JudgeEngine()
        judge.load(
            LoadSettings(
                model=self._folder, dtype="float32", device=self._device, kv_tokens=0, kv_bytes=0,
                max_num_batched_tokens=0, max_model_len=0, num_threads=torch.get_num_threads(), scratch="",
            )
        )  # fmt: skip
        return judge

    def _engine(self, dtype: str, **settings: Any) -> Engine:
        usual = {"attention": "fused", "block_size": 16, "kv_memory_bytes": 1 << 26, "max_num_batched_tokens": "auto"}
        config = EngineConfig(device=self._device, dtype=dtype, **(usual | settings))  # type: ignore[arg-type]
        return Engine.load(self._folder, config)

    def _generate(
        self, engine: Engine, drawn: Mapping[str, Any] | None = None
    ) -> tuple[list[list[int]], dict[str, int]]:
        """The answers, and counts of preempted requests, their blocks in host memory, cached and guessed tokens.

        Raises:
            WrongAnswerError: a request has an error in place of an answer; or a capture failed: the engine goes on
                without that graph, so no answer tells.
        """
        requests = [
            Request(
                request_id=str(index), token_ids=token_ids, max_new_tokens=self._num_new, ignore_eos=True,
                **(drawn or {}),
            )
            for index, token_ids in enumerate(self._prompts)
        ]  # fmt: skip
        groups = plan_prefix_groups(self._prompts, block_size=engine.config.shared_block_size)
        steps: list[StepRecord] = []
        found = {answer.request_id: answer for answer in engine.run_plan(requests, groups, on_step=steps.append)}
        if failures := graph_figures(engine)["failures"]:
            raise WrongAnswerError(f"{len(failures)} captures of CUDA graphs failed: {failures[0]}")
        if errors := [answer.error for answer in found.values() if answer.error is not None]:
            raise WrongAnswerError(f"{len(errors)} requests have an error in place of an answer: {errors[0]}")
        answers = [list(map(int, found[request.request_id].token_ids)) for request in requests]
        return answers, {
            "num_preempted": sum(step.num_preempted_requests for step in steps),
            "num_swapped_blocks": max(step.num_swapped_kv_blocks for step in steps),
            "num_cached_tokens": sum(answer.num_cached_tokens for answer in found.values()),
            "num_guessed": sum(step.num_guessed_tokens for step in steps),
        }

    def _require_same(self, engine: Engine, plain: list[list[int]], how: str) -> None:
        for run_number in range(self._num_repeats):
            if self._generate(engine)[0] != plain:
                raise WrongAnswerError(f"run {run_number} {how} gives other answers than without")


def graph_figures(engine: Engine) -> dict[str, Any]:
    """How many CUDA graphs an engine has captured, the mean and the longest time of a capture on the host, and why
    captures failed."""
    graphs = engine._runner.graphs
    taken_ms, failures = ([], []) if graphs is None else (graphs.capture_ms, graphs.failures)
    return {
        "num_graphs": len(taken_ms) - len(failures),
        "mean_capture_ms": round(sum(taken_ms) / max(len(taken_ms), 1), 2),
        "longest_capture_ms": round(max(taken_ms, default=0.0), 2),
        "failures": failures,
    }


def _prompts(vocab_size: int, num_prompts: int) -> list[list[int]]:
    """Prompts of which each three share a prefix."""
    rng = np.random.default_rng(4)
    prefixes = [rng.integers(3, vocab_size, length).tolist() for length in (20, 90, 37, 150)]
    return [
        prefixes[index // 3 % 4] + rng.integers(3, vocab_size, int(rng.integers(1, 40))).tolist()
        for index in range(num_prompts)
    ]
