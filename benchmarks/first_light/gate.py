"""Compares kernels with float64 and answers with transformers; the stage fails if they differ."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.first_light.answers import DRAWN, Answering, policies
from benchmarks.first_light.stage_run import StageRun
from benchmarks.kernels.attention import gated
from benchmarks.kernels.attention_batches import GroupSize, make_batch
from benchmarks.kernels.attention_implementations import OURS, QUICK, every_launch
from benchmarks.kernels.attention_step import TINY_CASE, Case, Step, check_cases
from benchmarks.kernels.gpu import device_time, error_of, in_one_line
from benchmarks.measuring.wrong_answer import WrongAnswerError
from benchmarks.random_model import SHAPES, model_config, write_checkpoint
from engine.device.gpu import find_fp8
from engine.errors import ConfigError
from engine.execution.step_graphs import DeviceGraph
from engine.kernels.draw import draw_tokens as draw_tokens_ref
from engine.kernels.reference import paged_attention_ref
from engine.kernels.scoring import Scoring
from engine.kernels.triton.draw_kernel import draw_tokens
from engine.kernels.triton.layers.fp8 import ScaledRows, quantize_weights, scaled_linear
from engine.kernels.triton.triton_attention import TritonAttention
from engine.kernels.triton.work_list import RowField
from engine.model.model_shape import ModelShape

SMALL_DRAWS = """
import torch
from engine.kernels.draw import draw_tokens as draw_tokens_ref
from engine.kernels.triton.draw_kernel import draw_tokens
kinds = [[0.7, 5000, 1, 0.5], [0.7, 50, 1, 0.5], [0.7, 5000, 0.9, 0.5], [0.7, 50, 0.9, 0.5]]
device = "cuda" if torch.cuda.is_available() else "cpu"
settings = torch.tensor(kinds, dtype=torch.float64, device=device)
torch.manual_seed(5)
logits = torch.randn(4, 5000, device=device)
assert (draw_tokens(logits, settings) == draw_tokens_ref(logits, settings)).all()
"""
"""A draw of each kind, for compute-sanitizer."""

DEVICE_REFUSED = "Device not supported"
"""In what compute-sanitizer prints where it cannot run. Otherwise it ends with 0, with 86 where it found an error, or
with what the check ended with."""

MOST_FP8_ERROR = 0.05
"""Largest error of a product in fp8, as a share of its largest number. Hopper's matrix units keep about 14 bits of a
sum: simulated, 1.2 % at a depth of 14,336; measured by others up to 2 % at 4,096 (DeepSeek-V3, section 3.3.2). A wrong
scale or row is off by far more."""


def run(stage: StageRun) -> None:
    for case in (TINY_CASE,) if stage.is_tiny else check_cases():
        stage.measure(f"tiles: {case.name}", partial(_tiles, case, stage.run.device))
    stage.measure("merges", partial(_merges, stage))
    stage.measure("draws", partial(_draws, stage))
    stage.measure("fp8 products", partial(_fp8_products, stage))
    for shape in ("tiny",) if stage.is_tiny else ("tiny", "medium"):
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), SHAPES[shape])
            _answers(stage, shape, Answering(folder, str(stage.run.device), SHAPES[shape]["vocab_size"]))
    stage.measure("a capture that fails", partial(_fail_a_capture, stage.run.device))
    stage.measure("compute-sanitizer", lambda: _sanitize(lambda: stage.seconds_left))


def _answers(stage: StageRun, shape: str, answering: Answering) -> None:
    """Answers of a model in each dtype and, of the last one, by each policy."""
    for dtype in ("float32", "bfloat16", "fp8"):
        stage.measure(f"{dtype} answers, {shape}", partial(answering.judge, dtype))
    stage.measure(f"graphs, {shape}", answering.with_graphs)
    stage.measure(f"two ranks, {shape}", answering.two_ranks)
    if stage.is_tiny or shape == "medium":
        stage.measure(f"drawn answers, {shape}", partial(answering.judge, "float32", DRAWN))
        config = ModelShape.from_config(model_config(SHAPES[shape]), dtype="float32")
        for name, settings in policies(config.kv_bytes_per_token):
            stage.measure(f"{name} answers, {shape}", partial(answering.judge, "float32", **settings))


def _fail_a_capture(device: torch.device) -> str:
    """Check that memory can be given back, and the next graph captured, after a capture that the driver ends.

    Raises:
        WrongAnswerError: the next graph computes something else, or what ends a capture was captured.
    """
    if device.type == "cpu":
        return "not run: there are no graphs here"
    stream, number = torch.cuda.Stream(device), torch.ones(1, device=device)  # type: ignore[no-untyped-call]
    try:
        DeviceGraph(stream, None).capture(lambda: print(number.item()))
    except RuntimeError as error:
        why = in_one_line(error)
    else:
        raise WrongAnswerError("a copy to the host was captured")
    torch.cuda.empty_cache()
    graph = DeviceGraph(stream, None)
    graph.capture(lambda: print(number.add_(1).shape))
    graph.replay()
    if number.item() != 2:
        raise WrongAnswerError(f"the graph after it gave {number.item()}, not 2")
    return why


def _tiles(case: Case, device: torch.device) -> dict[str, str]:
    """Check the implementations that compile quickly, and ours with every launch, not only the one a step would choose.

    Raises:
        SystemExit: one of ours is wrong.
    """
    step = Step.make(case, device)
    return dict(gated(step, lambda _: "agrees with float64", QUICK, every_launch(step)))


def _merges(stage: StageRun) -> dict[str, float]:
    """Check random steps in which rows have several parts: right, and bit-identical in every repetition.

    Raises:
        WrongAnswerError: a result is wrong or not repeatable, or counters are not reset.
    """
    run = stage.run
    num_merges, num_repeats = (1, 2) if stage.is_tiny else (1000, 100)
    prefix_lens = (500,) if stage.is_tiny else (0, 37, 500, 2500)
    rng = np.random.default_rng(3)
    backend = TritonAttention(
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
        work, scoring = backend.prepare(batch), Scoring(scale=128**-0.5)
        first: torch.Tensor | None = None
        for _ in range(num_repeats):
            work.partial_out.fill_(torch.nan)
            work.partial_lse.fill_(torch.nan)
            out = backend.attend(query, k_cache, v_cache, work, scoring)
            first = out if first is None else first
            if not torch.equal(out, first):
                raise WrongAnswerError(f"merge {merge} gives different bits when it is repeated")
        expected = paged_attention_ref(query.double(), k_cache.double(), v_cache.double(), batch, scoring)
        assert first is not None
        error, is_right = error_of(first, expected)
        if not is_right:
            raise WrongAnswerError(f"merge {merge} is wrong by {error:.3%}")
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
        timed = device_time(partial(draw_tokens, logits, settings))
        found[f"{name}, us"] = f"not timed: {timed.not_captured}" if timed.not_captured else timed.us
    return found


def _fp8_products(stage: StageRun) -> dict[str, float] | str:
    """Compare products in fp8 of few and many rows, in the sizes of an 8B model, with products of the same numbers in
    float32; or say why the device has no fp8.

    Raises:
        WrongAnswerError: a product differs by more than its accumulation explains.
    """
    device = stage.run.device
    try:
        dtype = find_fp8(device)
    except ConfigError as error:
        return f"not run: {error}"
    matrices = [(48, 64)] if stage.is_tiny else [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    errors = []
    for columns, depth in matrices:
        weights = quantize_weights(torch.randn(columns, depth, device=device), dtype)
        for num_rows in (1, 17) if stage.is_tiny else (1, 2, 16, 17, 64, 127, 256, 257, 8192):
            errors.append(_fp8_error(quantize_weights(torch.randn(num_rows, depth, device=device), dtype), weights))
    return {"num_products": len(errors), "largest_error": max(errors)}


def _fp8_error(rows: ScaledRows, weights: ScaledRows) -> float:
    """The largest error of a product, as a share of its largest number; `WrongAnswerError` where it is too large."""
    exact = (rows.values.float() * rows.scales) @ (weights.values.float() * weights.scales).t()
    found = scaled_linear(rows, weights, None, torch.bfloat16).float()
    error = float((found - exact).abs().max() / exact.abs().max())
    if not error < MOST_FP8_ERROR:
        columns, depth = weights.values.shape
        raise WrongAnswerError(f"{len(exact)} rows, matrix {columns} x {depth}: wrong by a share of {error}")
    return error


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


def _sanitize(seconds_left: Callable[[], float]) -> str:
    """The findings of compute-sanitizer in small checks of attention and of draws, or why it cannot run.

    Args:
        seconds_left: gives the time that is left for the stage.
    Raises:
        WrongAnswerError: the tool found an error, or a check failed.
    """
    tool = shutil.which("compute-sanitizer")
    if tool is None or not torch.cuda.is_available():
        return "not run: compute-sanitizer is not installed, or there is no GPU"
    attention = ["-m", "benchmarks.kernels.attention", "--cases", "*prefix-40 *", "--only", *OURS]
    found = []
    for check in (attention, ["-c", SMALL_DRAWS]):
        try:
            done = subprocess.run(
                [tool, "--tool", "memcheck", "--error-exitcode", "86", sys.executable, *check],
                env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, capture_output=True, text=True, check=False,
                timeout=min(max(seconds_left(), 10.0), 75.0),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            found.append("not run: it took too long")
            continue
        last, error = ((text.strip().splitlines() or [""])[-1] for text in (done.stdout, done.stderr))
        is_refused = DEVICE_REFUSED in done.stdout + done.stderr
        if done.returncode and not is_refused:
            raise WrongAnswerError(f"compute-sanitizer ended with {done.returncode}: {last}: {error}")
        found.append(f"not run: {DEVICE_REFUSED}" if is_refused else last)
    return "; ".join(found)
