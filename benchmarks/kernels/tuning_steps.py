"""Attention steps with known tiles, and the times of a launch for them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from benchmarks.kernels.attention_batches import GroupSize, make_batch
from benchmarks.kernels.cost_fit import MeasuredStep
from benchmarks.kernels.gpu import GpuRun, device_time, error_of
from benchmarks.measuring.wrong_answer import WrongAnswerError
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.reference import paged_attention_ref
from engine.kernels.scoring import Scoring
from engine.kernels.triton.cost_model import SharePolicy
from engine.kernels.triton.device_work import WorkCapacity
from engine.kernels.triton.triton_attention import PagedAttention, TritonAttention
from engine.kernels.triton.tuned import Launch

NUM_Q_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 32, 8, 16
REP_MS = 50.0
"""How long a step is measured; a candidate runs dozens of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningStep:
    """A step and its backends: with plain tiles only, or also with prefix tiles."""

    groups: list[GroupSize]
    has_prefix_tiles: bool = False
    is_mixed: bool = False


def tuning_steps() -> Iterator[TuningStep]:
    """Steps that separate the costs of starts, KV from memory, KV read again, and partial results; and long chunks."""
    for num_requests in (32, 256):
        for own in (64, 512, 2048):
            yield TuningStep(groups=[GroupSize(prefix_len=0, members=[(own, 1)]) for _ in range(num_requests)])
        for prefix in (512, 4096):
            for members in (4, 32):
                groups = [GroupSize(prefix_len=prefix, members=[(128, 1)] * members)] * (num_requests // members)
                yield TuningStep(groups=groups, has_prefix_tiles=True)
    for rows in (128, 512, 2048):
        alone = [GroupSize(prefix_len=0, members=[(rows, rows)]) for _ in range(7)]
        yield TuningStep(groups=alone, is_mixed=True)
        yield TuningStep(groups=[GroupSize(prefix_len=2048, members=[(rows, rows)] * 3)], is_mixed=True)


class SharedAttention(TritonAttention):
    """Every prefix is shared, as in relay attention, and merged within the launch, as the engine does it."""

    name: ClassVar[SharePolicy] = "relay"


class TuningBench:
    """Measures launches for one element type and head dim; the steps' expected results are computed once.

    Attributes:
        not_captured: "", or why times include the host's (`DeviceTime.not_captured`).
    """

    def __init__(
        self, run: GpuRun, dtype: torch.dtype, head_dim: int, steps: Iterable[TuningStep] | None = None
    ) -> None:
        """`steps` defaults to `tuning_steps()`."""
        self.not_captured = ""
        self._run = run
        self._dtype = dtype
        self._head_dim = head_dim
        self._steps = list(tuning_steps() if steps is None else steps)
        self._expected: dict[int, torch.Tensor] = {}

    def measure(self, launch: Launch) -> list[MeasuredStep]:
        """The times of the launch for each step and backend.

        Raises:
            WrongAnswerError: a result differs from the reference's.
        """
        found = []
        for index, step in enumerate(self._steps):
            if step.is_mixed and launch.wide is None:
                continue
            kinds: tuple[type[TritonAttention], ...] = (PagedAttention, SharedAttention)
            for kind in kinds if step.has_prefix_tiles else kinds[:1]:
                found.append(self._time(index, step, self._backend(kind), launch))
        return found

    def _backend(self, kind: type[TritonAttention]) -> TritonAttention:
        return kind(
            num_q_heads=NUM_Q_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=self._head_dim, dtype=self._dtype,
            block_size=BLOCK_SIZE, device=self._run.device,
        )  # fmt: skip

    def _time(self, index: int, step: TuningStep, backend: TritonAttention, launch: Launch) -> MeasuredStep:
        """A step's tiles and its time for one layer, after its result was compared."""
        batch, num_blocks = make_batch(step.groups, BLOCK_SIZE)
        query, k_cache, v_cache = self._inputs(batch, num_blocks)
        scale = self._head_dim**-0.5
        if index not in self._expected:
            self._expected[index] = paged_attention_ref(
                query.double(), k_cache.double(), v_cache.double(), batch, Scoring(scale=scale)
            )
        work_list = backend.plan(batch, (launch,))
        work = backend.reserve(WorkCapacity.of(work_list), launch)
        work.fill(work_list, batch.slot_mapping)
        attend = partial(backend.attend, query, k_cache, v_cache, work, Scoring(scale=scale))
        error, is_right = error_of(attend(), self._expected[index])
        if not is_right:
            raise WrongAnswerError(f"{backend.name} is wrong by {error:.3%}")
        found = device_time(attend, rep_ms=REP_MS)
        self.not_captured = self.not_captured or found.not_captured
        return MeasuredStep.of(
            work_list, num_kv_heads=NUM_KV_HEADS, num_processors=self._run.num_processors, us=found.us
        )

    def _inputs(self, batch: AttentionBatch, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query and caches of a step, the same for all candidates."""
        generator = torch.Generator(device=self._run.device).manual_seed(0)
        cache = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, self._head_dim)

        def normal(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randn(shape, dtype=self._dtype, device=self._run.device, generator=generator)

        return normal((batch.num_rows, NUM_Q_HEADS, self._head_dim)), normal(cache), normal(cache)
