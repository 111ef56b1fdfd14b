"""llama.cpp behind the benchmark's protocol: continuous batching over sequences that share the cells of a prefix.

llama.cpp leaves the schedule to its caller. This schedule is a good one: prompts start in the order given; each reuses
the longest prefix that a sequence holds, and waits for a prefix that is being computed; finished sequences are kept for
later prompts until their memory is needed, the least recently used is dropped first.
"""

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.llama_cpp_context import LlamaCppContext
from benchmarks.peers.protocol import Answers, Loaded, LoadSettings, Work, serve

LOOK_AHEAD = 64
"""Most waiting prompts that may overtake one that waits for its prefix."""

MIN_SHARED = 16
"""A prompt does not wait for a shorter prefix."""


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence of llama.cpp's memory.

    Attributes:
        tokens: tokens whose KV it holds, or will hold after this step.
        cells: the memory cell of each token; sequences may share cells.
        request: that it computes; None if it only keeps a finished prompt.
    """

    number: int
    tokens: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    num_computed: int = 0
    request: int | None = None
    last_used: int = 0

    @property
    def is_reading(self) -> bool:
        """Whether its prompt is not computed yet."""
        return len(self.tokens) - self.num_computed > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a schedule.

    Attributes:
        num_parallel: sequences answered at a time.
        num_slots: all sequences, including those that are only kept.
        num_cells: memory cells, one per token.
        max_num_batched_tokens: most rows in a batch.
    """

    num_parallel: int
    num_slots: int
    num_cells: int
    max_num_batched_tokens: int


class LlamaCppEngine:
    """One context; each work gets its own schedule."""

    def load(self, settings: LoadSettings) -> Loaded:
        """Options: max_parallel (16), sequences answered at a time; max_sequences (64), including kept ones."""
        self._limits = Limits(
            num_parallel=int(settings.options.get("max_parallel", 16)),
            num_slots=int(settings.options.get("max_sequences", 64)),
            num_cells=settings.kv_tokens,
            max_num_batched_tokens=settings.max_num_batched_tokens,
        )
        started = time.perf_counter()
        file = Path(settings.scratch) / f"{Path(settings.model).name}-{settings.dtype}.gguf"
        if not file.is_file():
            write_gguf(Path(settings.model), file, settings.dtype)
        convert_seconds = time.perf_counter() - started
        self._context = LlamaCppContext(file, settings, num_sequences=self._limits.num_slots)
        return Loaded(
            versions={"llama-cpp-python": version("llama-cpp-python")}, details={"convert_seconds": convert_seconds}
        )

    def run(self, work: Work) -> Answers:
        self._context.clear()
        run = _Run(self._context, self._limits, work)
        started = time.perf_counter()
        num_computed = run.finish()
        return Answers(
            token_ids=run.answers,
            label_logprobs=run.label_logprobs if work.labels else [],
            seconds=time.perf_counter() - started,
            num_computed_tokens=num_computed,
        )


class _Run:
    """The schedule of one work."""

    def __init__(self, context: LlamaCppContext, limits: Limits, work: Work) -> None:
        self._context = context
        self._limits = limits
        self._prompts = work.token_ids
        self._labels = work.labels
        self._num_output = 1 if work.labels else work.num_output_tokens
        self.answers: list[list[int]] = [[] for _ in work.token_ids]
        self.label_logprobs: list[list[float]] = [[] for _ in work.token_ids]
        self._waiting = deque(range(len(work.token_ids)))
        self._slots = [Slot(number) for number in range(limits.num_slots)]
        self._users: Counter[int] = Counter()
        self._next_cell = count()
        self._clock = count(1)

    def finish(self) -> int:
        """Run to the end; returns the number of computed rows."""
        num_computed = 0
        while self._waiting or any(slot.request is not None for slot in self._slots):
            self._admit()
            num_computed += self._step()
        return num_computed

    def _running(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.request is not None]

    def _admit(self) -> None:
        room = self._limits.num_parallel - len(self._running())
        skipped = []
        while room and self._waiting and len(skipped) < LOOK_AHEAD:
            request = self._waiting.popleft()
            started = self._start(request)
            if started is None:
                skipped.append(request)
            elif started:
                room -= 1
            else:
                skipped.append(request)
                break
        self._waiting.extendleft(reversed(skipped))

    def _start(self, request: int) -> bool | None:
        """Give a request a sequence; False if memory is short, None if it should wait for its prefix."""
        prompt = self._prompts[request]
        held = [(_common(slot.tokens[: slot.num_computed], prompt), slot) for slot in self._slots]
        best, source = max(held, key=lambda pair: pair[0])
        best = min(best, len(prompt) - 1)
        coming = max((_common(slot.tokens, prompt) for slot in self._running()), default=0)
        if min(coming, len(prompt) - 1) >= best + MIN_SHARED:
            return None
        idle = sorted((slot for slot in self._slots if slot.request is None), key=lambda slot: slot.last_used)
        spare = [slot for slot in idle if slot is not source]
        needed = len(prompt) + self._num_output - best - 1
        reserved = sum(
            len(self._prompts[slot.request]) + self._num_output - 1 - len(slot.cells)
            for slot in self._running()
            if slot.request is not None
        )
        while len(+self._users) + reserved + needed > self._limits.num_cells and any(slot.cells for slot in spare):
            self._clear(next(slot for slot in spare if slot.cells))
        if len(+self._users) + reserved + needed > self._limits.num_cells or not idle:
            if source.request is not None or not source.cells or self._running():
                return False
            best = 0  # nothing runs: even the sequence that it would continue must be dropped
            self._clear(source)
        target = spare[0] if spare else source
        shared = source.cells[:best]
        self._users.update(shared)
        self._users.subtract(target.cells)
        self._context.share(source.number, target.number, best)
        target.tokens, target.cells, target.num_computed = list(prompt), list(shared), best
        target.request, target.last_used = request, next(self._clock)
        source.last_used = target.last_used
        return True

    def _clear(self, slot: Slot) -> None:
        self._context.drop(slot.number)
        self._users.subtract(slot.cells)
        slot.tokens, slot.cells, slot.num_computed = [], [], 0

    def _step(self) -> int:
        """One batch: the next token of every answer first, then prompts in the order in which they started."""
        rows: list[tuple[int, int, int, bool]] = []
        owners: dict[int, Slot] = {}
        for slot in sorted(self._running(), key=lambda slot: (slot.is_reading, slot.last_used)):
            last = min(len(slot.tokens), slot.num_computed + self._limits.max_num_batched_tokens - len(rows))
            for position in range(slot.num_computed, last):
                is_last = position == len(slot.tokens) - 1
                if is_last:
                    owners[len(rows)] = slot
                rows.append((slot.tokens[position], position, slot.number, is_last))
            cells = [next(self._next_cell) for _ in range(slot.num_computed, last)]
            self._users.update(cells)
            slot.cells += cells
            slot.num_computed = last
        self._context.decode(rows)
        for row, slot in owners.items():
            assert slot.request is not None
            logits = self._context.logits(row)
            if self._labels:
                scores = logits[self._labels].astype(np.float64)
                self.label_logprobs[slot.request] = (scores - np.logaddexp.reduce(scores)).tolist()
            else:
                token = int(logits.argmax())
                self.answers[slot.request].append(token)
            if self._labels or len(self.answers[slot.request]) == self._num_output:
                slot.request, slot.last_used = None, next(self._clock)
            else:
                slot.tokens.append(token)
        return len(rows)


def _common(held: list[int], prompt: list[int]) -> int:
    """Number of common first tokens."""
    num_tokens = min(len(held), len(prompt))
    if held[:num_tokens] == prompt[:num_tokens]:
        return num_tokens
    low, high = 0, num_tokens
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if held[:middle] == prompt[:middle] else (low, middle)
    return low


if __name__ == "__main__":
    serve(LlamaCppEngine())
