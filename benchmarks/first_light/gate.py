"""Compares kernels with float64 and answers with transformers; the stage fails if they differ."""

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.first_light.stage_run import StageRun
from benchmarks.kernels.attention import gated
from benchmarks.kernels.attention_batches import GroupSize, make_batch
from benchmarks.kernels.attention_implementations import NAMES, OURS, every_launch
from benchmarks.kernels.attention_step import Case, Step, check_cases
from benchmarks.kernels.gpu import GpuRun, device_time
from benchmarks.measuring.correctness import NEAR_TIE
from benchmarks.measuring.wrong_answer import WrongAnswerError
from benchmarks.peers.judge_engine import JudgeEngine
from benchmarks.peers.protocol import LoadSettings
from benchmarks.random_model import SHAPES, write_checkpoint
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels.draw import draw_tokens as draw_tokens_ref
from engine.kernels.reference import paged_attention_ref
from engine.kernels.triton.draw_kernel import draw_tokens
from engine.kernels.triton.fused import FusedAttention
from engine.kernels.triton.work_list import RowField
from engine.request import Request

BF16_GAP = 0.3
"""Largest distance of a bf16 answer's token from the best float32 logit; these models' logits have a deviation of 1."""

QUICK = tuple(name for name in NAMES if name != "flex")
"""Implementations that torch does not compile for each case, which takes ten seconds or more."""

TINY_CASE = Case(
    model="Qwen2-7B", prefix_len=16, own_len=4, num_members=2, num_decode=2, num_prefill=0, prefill_rows=1
)  # fmt: skip


def run(stage: StageRun) -> None:
    for case in (TINY_CASE,) if stage.is_tiny else check_cases():
        stage.measure(f"tiles: {case.name}", partial(_tiles, case, stage.run.device))
    stage.measure("merges", partial(_merges, stage))
    stage.measure("draws", partial(_draws, stage))
    for shape in ("tiny",) if stage.is_tiny else ("tiny", "medium"):
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), SHAPES[shape])
            prompts = _prompts(SHAPES[shape]["vocab_size"], 2 if stage.is_tiny else 24)
            of_model = (folder, str(stage.run.device), prompts)
            stage.measure(f"float32 answers, {shape}", partial(_answers, *of_model, "float32", NEAR_TIE))
            stage.measure(f"bfloat16 answers, {shape}", partial(_answers, *of_model, "bfloat16", BF16_GAP))
            stage.measure(f"graphs, {shape}", partial(_graphs, *of_model))
            stage.measure(f"two ranks, {shape}", partial(_two_ranks, *of_model))
    stage.measure("compute-sanitizer", lambda: _sanitize(stage.seconds_left))


def _tiles(case: Case, device: torch.device) -> dict[str, str]:
    """Check the implementations that compile quickly, and ours with every launch, not only the one a step would choose.

    Raises:
        SystemExit: one of ours is wrong.
        WrongAnswerError: one of ours is wrong under a launch.
    """
    step = Step.make(case, device)
    found = dict(gated(step, lambda _: "agrees with float64", QUICK))
    expected = paged_attention_ref(
        step.query.double(), step.k_cache.double(), step.v_cache.double(), step.batch, scale=step.scale
    )
    for name, attend in every_launch(step):
        error = float((attend().double() - expected).abs().max())
        if not error < GpuRun.tolerance(torch.bfloat16):
            raise WrongAnswerError(f"{name} is wrong by {error} on {case.name}")
        found[name] = "agrees with float64"
    return found


def _merges(stage: StageRun) -> dict[str, float]:
    """Check random steps in which rows have several parts: right, and bit-identical in every repetition.

    Raises:
        WrongAnswerError: a result is wrong or not repeatable, or counters are not reset.
    """
    run = stage.run
    num_merges, num_repeats = (1, 2) if stage.is_tiny else (1000, 100)
    prefix_lens = (500,) if stage.is_tiny else (0, 37, 500, 2500)
    rng = np.random.default_rng(3)
    backend = FusedAttention(
        num_q_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16, block_size=16, device=run.device
    )
    num_tried, worst = 0, 0.0
    for merge in range(num_merges):
        has_parts = False
        while not has_parts:
            num_tried += 1
            batch, num_blocks = make_batch(_random_groups(rng, prefix_lens), 16, seed=num_tried)
            has_parts = bool((backend.plan(batch).rows[:, RowField.NUM_PARTS] > 1).any())
        generator = torch.Generator(run.device).manual_seed(merge)
        query, k_cache, v_cache = (
            torch.randn(shape, generator=generator, device=run.device, dtype=torch.bfloat16)
            for shape in ((batch.num_rows, 8, 128), (num_blocks, 16, 2, 128), (num_blocks, 16, 2, 128))
        )
        work = backend.prepare(batch)
        first: torch.Tensor | None = None
        for _ in range(num_repeats):
            work.partial_out.fill_(torch.nan)
            work.partial_lse.fill_(torch.nan)
            out = backend.attend(query, k_cache, v_cache, work, scale=128**-0.5)
            first = out if first is None else first
            if not torch.equal(out, first):
                raise WrongAnswerError(f"merge {merge} gives different bits when it is repeated")
        expected = paged_attention_ref(query.double(), k_cache.double(), v_cache.double(), batch, scale=128**-0.5)
        assert first is not None
        error = float((first.double() - expected).abs().max())
        if not error < run.tolerance(torch.bfloat16):
            raise WrongAnswerError(f"merge {merge} is wrong by {error}")
        if work.counters.any():
            raise WrongAnswerError(f"merge {merge} leaves counters behind")
        worst = max(worst, error)
    return {"num_merges": num_merges, "num_repeats": num_repeats, "largest_error": worst}


def _draws(stage: StageRun) -> dict[str, float | str]:
    """Compare random draws by each kind of setting with those that sort every row, and time ours.

    Raises:
        WrongAnswerError: more rows differ than rounding between two tokens explains.
    """
    device = stage.run.device
    num_rows, vocab_size = (4, 1500) if stage.is_tiny else (512, 128_256)
    generator = torch.Generator(device).manual_seed(5)
    logits = 3 * torch.randn(num_rows, vocab_size, generator=generator, device=device)
    found: dict[str, float | str] = {"num_rows": num_rows, "vocab_size": vocab_size}
    for name, top_k, top_p in (("temperature", vocab_size, 1.0), ("top-k", 50, 1.0), ("top-p", vocab_size, 0.9)):
        settings = torch.tensor([[0.7, top_k, top_p, 0.0]], dtype=torch.float64, device=device).repeat(num_rows, 1)
        settings[:, 3] = torch.rand(num_rows, generator=generator, device=device)
        num_wrong = int((draw_tokens(logits, settings) != draw_tokens_ref(logits, settings)).sum())
        if num_wrong > num_rows // 100:
            raise WrongAnswerError(f"{name}: {num_wrong} of {num_rows} draws are other tokens")
        timed = None if stage.is_tiny else device_time(partial(draw_tokens, logits, settings))
        found[f"{name}, us"] = "not timed" if timed is None else timed.us
    return found


def _random_groups(rng: np.random.Generator, prefix_lens: Sequence[int]) -> list[GroupSize]:
    """Up to three groups: long prefixes with few rows are split, others shared, some neither."""
    groups = []
    for _ in range(rng.integers(1, 4)):
        members = []
        for _ in range(rng.integers(1, 7)):
            own = int(rng.integers(1, 300))
            members.append((own, 1 if rng.random() < 0.8 else int(rng.integers(1, min(own, 40) + 1))))
        groups.append(GroupSize(prefix_len=int(rng.choice(prefix_lens)), members=members))
    return groups


def _prompts(vocab_size: int, num_prompts: int) -> list[list[int]]:
    """Prompts of which each three share a prefix."""
    rng = np.random.default_rng(4)
    prefixes = [rng.integers(3, vocab_size, length).tolist() for length in (20, 90, 37, 150)]
    return [
        prefixes[index // 3 % 4] + rng.integers(3, vocab_size, int(rng.integers(1, 40))).tolist()
        for index in range(num_prompts)
    ]


def _generate(engine: Engine, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    requests = [
        Request(request_id=str(index), token_ids=token_ids, max_new_tokens=num_new, ignore_eos=True)
        for index, token_ids in enumerate(prompts)
    ]
    return [list(map(int, answer.token_ids)) for answer in engine.generate(requests)]


def _engine(folder: str, device: str, dtype: str, **settings: Any) -> Engine:
    usual = {"attention": "fused", "block_size": 16, "kv_memory_bytes": 1 << 26, "max_num_batched_tokens": "auto"}
    return Engine.load(folder, EngineConfig(device=device, dtype=dtype, **(usual | settings)))  # type: ignore[arg-type]


def _answers(folder: str, device: str, prompts: list[list[int]], dtype: str, most_gap: float) -> dict[str, float]:
    """Compare each token of the engine's answers with transformers' logits in float32.

    Raises:
        WrongAnswerError: a token's logit is further than `most_gap` from the best.
    """
    judge = JudgeEngine()
    judge.load(
        LoadSettings(
            model=folder, dtype="float32", device=device, kv_tokens=0, kv_bytes=0, max_num_batched_tokens=0,
            max_model_len=0, num_threads=torch.get_num_threads(), scratch="",
        )
    )  # fmt: skip
    answers = _generate(_engine(folder, device, dtype), prompts, 2 if device == "cpu" else 16)
    gaps = judge.token_gaps({"prompts": prompts, "answers": answers})["gaps"]
    largest = max(max(found) for found in gaps)
    if not largest <= most_gap:
        raise WrongAnswerError(f"a token is {largest:.3g} below the best logit, at most {most_gap} is right")
    num_greedy = sum(max(found) == 0 for found in gaps)
    return {"num_answers": len(answers), "num_greedy": num_greedy, "largest_gap": largest}


def _graphs(folder: str, device: str, prompts: list[list[int]]) -> dict[str, int]:
    """Check that answers are the same with and without CUDA graphs, which are captured in the second run.

    Raises:
        WrongAnswerError: they differ.
    """
    num_new = 2 if device == "cpu" else 16
    plain = _generate(_engine(folder, device, "float32", cuda_graphs="never"), prompts, num_new)
    engine = _engine(folder, device, "float32")
    for run_number in range(1 if device == "cpu" else 3):
        if _generate(engine, prompts, num_new) != plain:
            raise WrongAnswerError(f"run {run_number} with CUDA graphs gives other answers than without")
    return {"num_answers": len(plain)}


def _two_ranks(folder: str, device: str, prompts: list[list[int]]) -> str:
    """Check that a model on two devices gives the answers of one device, with and without graphs.

    Raises:
        WrongAnswerError: they differ.
    """
    if device != "cpu" and torch.cuda.device_count() < 2:
        return "not run: there is one GPU"
    attention, num_new = ("torch", 2) if device == "cpu" else ("fused", 16)
    plain = _generate(_engine(folder, device, "float32", attention=attention), prompts, num_new)
    for graphs in ("never", "auto")[: 1 if device == "cpu" else 2]:
        engine = _engine(folder, device, "float32", attention=attention, tensor_parallel_size=2, cuda_graphs=graphs)
        for run_number in range(1 if device == "cpu" else 3):
            if _generate(engine, prompts, num_new) != plain:
                raise WrongAnswerError(f"run {run_number} of two ranks, graphs {graphs}: other answers than one")
        del engine
        gc.collect()
    return "the same answers"


def _sanitize(seconds: float) -> str:
    """The findings of compute-sanitizer in a small check, or why it cannot run."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return "not run: compute-sanitizer is not installed"
    program = [sys.executable, "-m", "benchmarks.kernels.attention"]
    check = [*program, "--check", "--cases", "*prefix-40 *", "--only", *OURS]
    try:
        done = subprocess.run(
            [tool, "--tool", "memcheck", "--error-exitcode", "86", *check],
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, capture_output=True, text=True, check=False,
            timeout=min(max(seconds, 10.0), 150.0),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "not run: it took too long"
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode == 86:
        raise WrongAnswerError(f"compute-sanitizer: {last}")
    return last if done.returncode == 0 else f"not run: exit code {done.returncode}: {last}"
