"""Eight questions about a row, asked as one prefix group, against eight workloads that ask one question each:
    python -m benchmarks.decide --model FOLDER [--rows N] [--row-tokens N] [--rounds N] [--dtype D] [--out FILE]

Rows are passages of Python's own reference. Both sides tokenize, plan and infer the same prompts with the same labels,
without the database. One side asks all questions with ``mode = "decide"``, the other runs ``mode = "score"`` once per
question, with the question in its template. They take turns, the model is loaded once for both, and the first round is
not counted. If a probability differs by more than the number format explains, no figures are given.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.model_folder import find_model
from benchmarks.measuring.result_file import report
from benchmarks.measuring.turns import in_turn
from benchmarks.measuring.wrong_answer import WrongAnswerError, refuse_wrong_answers
from engine.completion import Completion
from engine.config import EngineConfig
from engine.engine import Engine
from tasks.explain import read_all_rows
from tasks.plan_prefix import write_plan
from tasks.prompts.prompt import RequestForm
from tasks.prompts.text_codec import TextCodec
from tasks.read import requests_schema
from tasks.storage.artifact import write_parquet
from tasks.tokenize import write_tokens
from tasks.workloads.workload import Workload, load_workload

QUESTIONS = {
    "for_beginners": ("BOOLEAN", "Is the text for beginners?"),
    "has_code": ("BOOLEAN", "Does the text hold an example in code?"),
    "on_statements": ("BOOLEAN", "Is the text about statements?"),
    "on_errors": ("BOOLEAN", "Does the text say what raises an exception?"),
    "topic": ("ENUM('statements', 'expressions', 'types', 'classes', 'modules')", "What is the text about?"),
    "form": ("ENUM('definition', 'example', 'list')", "What form does the text have?"),
    "clarity": ("SCORE(1, 5)", "How clear is the text?"),
    "depth": ("SCORE(1, 3)", "How deep does the text go?"),
}
LARGEST_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.1}


@dataclass(frozen=True, slots=True)
class Side:
    """The costs and results of one side.

    Attributes:
        seconds: of wall time.
        cpu_seconds: of the process.
        num_computed_tokens: prompt tokens that went through the model.
        probabilities: of the labels of each question (first index) and row.
    """

    seconds: float
    cpu_seconds: float
    num_computed_tokens: int
    probabilities: list[list[tuple[float, ...]]]


class Bench:
    """A loaded model and the rows."""

    def __init__(self, folder: Path, engine: Engine, checkpoint: Path, bodies: Sequence[str]) -> None:
        self._folder, self._engine, self._checkpoint = folder, engine, checkpoint
        self._codec = TextCodec.load(checkpoint)
        (folder / "rows.sql").write_text("select row_key, body from rows")
        head = 'requests_sql = "rows.sql"\nkey = ["row_key"]\n'
        prompt = '[prompt]\ntemplate = """{body}'
        decide = "".join(
            f'{name} = {{ type = "{type_}", ask = "{ask}" }}\n' for name, (type_, ask) in QUESTIONS.items()
        )
        text = f'name = "decide"\nmode = "decide"\n{head}{prompt}"""\n[output]\ntable = "a"\n[questions]\n{decide}'
        self.decide = self._load(text)
        self.scores = []
        output = '[output]\ntable = "a"\n'
        for name, suffix in zip(QUESTIONS, self.decide.kind.suffixes, strict=True):
            labels = suffix.rpartition("one of: ")[2].rstrip(".").split(", ")
            text = f'name = "{name}"\nmode = "score"\n{head}labels = {labels}\n{prompt}{suffix}"""\n{output}'
            self.scores.append(self._load(text))
        self._requests = {
            workload.name: self._write_requests(workload, bodies) for workload in (self.decide, *self.scores)
        }

    def run(self, workloads: Sequence[Workload]) -> Side:
        """Tokenize, plan and infer each of the workloads."""
        started, cpu_started = time.perf_counter(), time.process_time()
        num_computed, probabilities = 0, []
        for workload in workloads:
            tokens = write_tokens(
                self._requests[workload.name], self._folder / "tokens.parquet", workload, self._checkpoint, 8192
            )
            plan = read_all_rows(write_plan(tokens, self._folder / "plan.parquet", "exact", 10**9, 1))
            form = RequestForm.of(workload, self._codec, None)
            completions = sorted(self._engine.run_plan(form.ask(plan), plan.groups()), key=_number)
            num_computed += sum(each.num_prompt_tokens - each.num_cached_tokens for each in completions)
            stride = len(form.settings)
            probabilities += [[tuple(each.label_logprobs) for each in completions[n::stride]] for n in range(stride)]
        return Side(time.perf_counter() - started, time.process_time() - cpu_started, num_computed, probabilities)

    def _load(self, text: str) -> Workload:
        (self._folder / "workload.toml").write_text(text)
        return load_workload(self._folder / "workload.toml")

    def _write_requests(self, workload: Workload, bodies: Sequence[str]) -> Any:
        schema = requests_schema(workload)
        rows = [
            {
                "row_id": number, "row_key": f"{number:05}", "body": body, "content_key": str(number), "error": None,
                "row_priority": 0, "open_questions": list(range(len(QUESTIONS))),
            }
            for number, body in enumerate(bodies)
        ]  # fmt: skip
        rows = [{name: row[name] for name in schema.names} for row in rows]
        return write_parquet(
            self._folder / f"{workload.name}.parquet", schema, [pa.RecordBatch.from_pylist(rows, schema=schema)]
        )


def _number(completion: Completion) -> int:
    return int(completion.request_id)


def make_bodies(codec: TextCodec, num_rows: int, num_tokens: int) -> list[str]:
    """Passages of about `num_tokens` tokens, from different places of Python's reference."""
    token_ids = codec.encode(["\n".join(topics.values())], add_special_tokens=False)[0]
    step = max(1, (len(token_ids) - num_tokens) // num_rows)
    return [codec.decode(token_ids[row * step : row * step + num_tokens]) for row in range(num_rows)]


def check(decide: Side, scores: Side, dtype: str) -> float:
    """The largest difference of a probability; `WrongAnswerError` if it is too large."""
    differences = [
        np.abs(np.exp(row) - np.exp(other)).max()
        for of_question, of_other in zip(decide.probabilities, scores.probabilities, strict=True)
        for row, other in zip(of_question, of_other, strict=True)
    ]
    worst = float(np.max(differences))
    if not worst <= LARGEST_DIFFERENCE[dtype]:  # NaN is no answer either
        raise WrongAnswerError(f"a probability differs by {worst:.2g} between the two sides")
    return worst


def measure(bench: Bench, rounds: int, dtype: str) -> Mapping[str, Any]:
    """Both sides in turn; medians, and the ratio of each round."""
    pairs, workloads = [], {"decide": [bench.decide], "score": bench.scores}
    for number in range(rounds + 1):
        sides = {name: bench.run(workloads[name]) for name in in_turn(workloads, number)}
        decide, scores = sides["decide"], sides["score"]
        difference = check(decide, scores, dtype)
        if number:
            pairs.append((decide, scores))
    ratios = {
        name: [getattr(scores, name) / getattr(decide, name) for decide, scores in pairs]
        for name in ("seconds", "cpu_seconds", "num_computed_tokens")
    }
    return {
        "largest_difference": difference,
        "decide_seconds": median(decide.seconds for decide, _ in pairs),
        "score_seconds": median(scores.seconds for _, scores in pairs),
        "decide_computed_tokens": pairs[0][0].num_computed_tokens,
        "score_computed_tokens": pairs[0][1].num_computed_tokens,
        **{f"{name}_ratio": round(median(values), 3) for name, values in ratios.items()},
        "all_seconds_ratios": [round(value, 3) for value in ratios["seconds"]],
        "all_cpu_seconds_ratios": [round(value, 3) for value in ratios["cpu_seconds"]],
    }


@refuse_wrong_answers
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with the options in `arguments` (the process's own if None)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decide")
    parser.add_argument("--model", required=True, help="checkpoint folder, GGUF file or hub id")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--row-tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=sorted(LARGEST_DIFFERENCE), default="bfloat16")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    checkpoint = find_model(options.model)
    engine = Engine.load(checkpoint, EngineConfig(dtype=options.dtype))
    bodies = make_bodies(TextCodec.load(checkpoint), options.rows, options.row_tokens)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), engine, checkpoint, bodies)
        found = measure(bench, options.rounds, options.dtype)
    report(
        "decide", arguments, options.out, machine=describe_machine(), model=Path(options.model).name,
        num_rows=options.rows, num_row_tokens=options.row_tokens, num_questions=len(QUESTIONS), **found,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
