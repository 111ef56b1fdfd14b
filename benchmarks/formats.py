"""Number formats of one model in turn, on prompts and on decode steps:
    python -m benchmarks.formats --model FOLDER [--formats bfloat16 int8] [--rows 1 8 32 64] [--rounds N] [--out FILE]

Each format has an engine of its own, loaded once; in each round all engines compute the same prompts of random tokens,
one engine after the other, and the first round is not counted. Ratios compare a format with the first one, round by
round. Before that, every engine scores two labels after the same prompts, and if a probability differs from the first
format's by more than the formats explain, no figures are given.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.model_folder import find_model
from benchmarks.measuring.result_file import report
from benchmarks.measuring.turns import in_turn
from benchmarks.measuring.wrong_answer import WrongAnswerError, refuse_wrong_answers
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.step_record import StepRecord
from engine.planning.prefix_groups import plan_prefix_groups
from engine.request import Request

FORMATS = ("float32", "bfloat16", "int8")
LARGEST_DIFFERENCE = 0.1
"""Of the probability of one of two labels."""

PREFIX_TOKENS, PROMPT_TOKENS = 200, 320
"""Of the prompts that are timed: half of them begin with one prefix, half with another."""

DECODE_PROMPT_TOKENS = 64
"""Of the prompts whose answers are decoded; they share nothing."""


class Bench:
    """Engines by number format, and prompts for them.

    Args:
        engines: by format, the one that others are compared with first.
        num_prompts: timed at once.
        num_new_tokens: of each answer whose decode steps are timed.
    """

    def __init__(self, engines: Mapping[str, Engine], *, num_prompts: int, num_new_tokens: int) -> None:
        self._engines = engines
        self._num_prompts, self._num_new_tokens = num_prompts, num_new_tokens
        self._vocab_size = min(engine.vocab_size for engine in engines.values())

    def check(self) -> dict[str, float]:
        """The largest difference of a label's probability from the first format's, by format.

        Raises:
            WrongAnswerError: it is too large.
        """
        prompts = self._make_prompts(np.random.default_rng(0))
        labels = ((self._vocab_size // 3,), (self._vocab_size // 2,))
        requests = [
            Request(request_id=str(number), token_ids=prompt, mode="score", labels=labels)
            for number, prompt in enumerate(prompts)
        ]
        found = {
            name: np.exp([completion.label_logprobs for completion in engine.score(requests)])
            for name, engine in self._engines.items()
        }
        first, *others = found
        differences = {name: float(np.abs(found[name] - found[first]).max()) for name in others}
        for name, difference in differences.items():
            if not difference <= LARGEST_DIFFERENCE:
                raise WrongAnswerError(f"a probability in {name} differs by {difference:.2g} from that in {first}")
        return differences

    def time_prompts(self, engine: Engine, seed: int) -> float:
        """Milliseconds of all prompts, with one token decoded for each."""
        requests = self._ask(self._make_prompts(np.random.default_rng(seed)), num_new_tokens=1)
        started = time.perf_counter()
        engine.generate(requests)
        return 1000 * (time.perf_counter() - started)

    def time_decode(self, engine: Engine, num_rows: int, seed: int) -> float:
        """Median milliseconds of a step that decodes one token of each of `num_rows` answers."""
        prompts = np.random.default_rng(seed).integers(0, self._vocab_size, (num_rows, DECODE_PROMPT_TOKENS))
        requests = self._ask(prompts, num_new_tokens=self._num_new_tokens)
        steps: list[StepRecord] = []
        for _ in engine.run_plan(requests, plan_prefix_groups(list(prompts)), on_step=steps.append):
            pass
        return median(step.duration_ms for step in steps if step.num_decode_tokens == step.num_tokens == num_rows)

    def _make_prompts(self, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """``[num_prompts, PROMPT_TOKENS]`` random token ids, below two prefixes."""
        prompts = rng.integers(0, self._vocab_size, (self._num_prompts, PROMPT_TOKENS))
        prefixes = rng.integers(0, self._vocab_size, (2, PREFIX_TOKENS))
        prompts[:, :PREFIX_TOKENS] = prefixes[np.arange(self._num_prompts) % 2]
        return prompts

    @staticmethod
    def _ask(prompts: npt.NDArray[np.int64], *, num_new_tokens: int) -> list[Request]:
        return [
            Request(request_id=str(number), token_ids=prompt, max_new_tokens=num_new_tokens, ignore_eos=True)
            for number, prompt in enumerate(prompts)
        ]

    def measure(self, rounds: int, rows: Sequence[int]) -> dict[str, Any]:
        """Milliseconds by work and format: medians of the rounds, and how many times as fast as the first format."""
        works = {"prompts": self.time_prompts} | {
            f"decode {count}": lambda engine, seed, count=count: self.time_decode(engine, count, seed) for count in rows
        }
        times: dict[str, dict[str, list[float]]] = {work: {name: [] for name in self._engines} for work in works}
        for number in range(rounds + 1):
            for work, run in works.items():
                for name, engine in in_turn(self._engines.items(), number):
                    duration_ms = run(engine, number + 1)
                    if number:
                        times[work][name].append(duration_ms)
        first = next(iter(self._engines))
        return {
            work: {
                name: {
                    "ms": round(median(found), 3),
                    "speedup": round(median(map(truediv, by_format[first], found)), 3),
                    "all_speedups": [round(ratio, 3) for ratio in map(truediv, by_format[first], found)],
                }
                for name, found in by_format.items()
            }
            for work, by_format in times.items()
        }


@refuse_wrong_answers
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with the options in `arguments` (the process's own if None)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formats")
    parser.add_argument("--model", required=True, help="checkpoint folder, GGUF file or hub id")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bfloat16", "int8"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 64], help="of decode steps")
    parser.add_argument("--prompts", type=int, default=16, help="timed at once")
    parser.add_argument("--new-tokens", type=int, default=24, help="of each decoded answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    checkpoint = find_model(options.model)
    config = {"kv_memory_bytes": 512 << 20, "max_model_len": 512}
    engines = {name: Engine.load(checkpoint, EngineConfig(dtype=name, **config)) for name in options.formats}
    bench = Bench(engines, num_prompts=options.prompts, num_new_tokens=options.new_tokens)
    differences = bench.check()
    report(
        "formats", arguments, options.out, machine=describe_machine(), model=Path(options.model).name,
        largest_differences=differences, works=bench.measure(options.rounds, options.rows),
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
