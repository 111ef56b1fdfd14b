"""Workloads over the same documents: planned together, and one after the other:
    python -m benchmarks.nights --model FOLDER [--kept-prefixes] [--documents N] [--rounds N] [--out FILE]
    python -m benchmarks.nights --model FOLDER --deadline 3min --documents 3000

Each of three workloads asks one question about each of N documents of about 400 tokens, with the document first. A
night file without `after` plans them together; a chain of `after` answers them one after the other. Rounds alternate
between both, every row is answered again, and the first round of each is not counted. If an answer differs, no figures
are given. Seconds are those of the model's steps; computed tokens are prompt tokens that went through the model.

With --kept-prefixes a first night asks the three questions and keeps the documents' KV on disk. Later nights ask a new
question about the same documents, alternately with the kept KV and without; seconds include reading the files.

With --deadline two nights run with this budget and more documents than fit: the first knows no earlier run with the
model, the second knows from the first how long loading takes. `late` is the time after the deadline as a share of the
budget, negative if the night ended early. If a night finishes all rows, or a row is written twice, no figures are
given.
"""

import argparse
import atexit
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.model_folder import find_model
from benchmarks.measuring.result_file import report
from benchmarks.measuring.turns import in_turn
from benchmarks.measuring.wrong_answer import WrongAnswerError, refuse_wrong_answers
from flows.command.failure import end_quietly
from flows.command.prefect_server import temporary_server
from flows.nights.night import night
from tasks.nights.deadline import parse_budget
from tasks.prompts.text_codec import TextCodec

DOCUMENT_TOKENS = 400
QUESTIONS = {
    "urgent": "Does the writer need an answer today?",
    "angry": "Is the writer angry?",
    "paid": "Is it about money?",
}
NEW_QUESTION = {"thanks": "Does the writer say thank you?"}
WORKLOAD = """
name = "{name}"
mode = "score"
requests_sql = "documents.sql"
key = ["doc_id"]
labels = ["yes", "no"]
[prompt]
chat = false
template = "{{body}} {question} Answer yes or no:"
[output]
table = "{name}"
"""
NIGHT = """
database = "night.duckdb"
[models.one]
path = "{model}"
dtype = "float32"
kv_memory = "{kv_mib}MiB"
"""


def write_files(folder: Path, model: Path, num_documents: int, kv_mib: int) -> dict[str, Path]:
    """Write the database, the workloads and both night files; returns the night files by name."""
    codec, rng = TextCodec.load(model), np.random.default_rng(0)
    words = [f"{syllable}{ending}" for syllable in ("ma", "to", "ri", "ke", "lu") for ending in ("ter", "son", "lin")]
    with duckdb.connect(str(folder / "night.duckdb")) as connection:
        connection.execute("create table mails (doc_id text, body text)")
        for number in range(num_documents):
            text = " ".join(rng.choice(words, DOCUMENT_TOKENS))
            (token_ids,) = codec.encode([text], add_special_tokens=False)
            body = f"{number}: {text[: len(text) * DOCUMENT_TOKENS // len(token_ids)]}"
            connection.execute("insert into mails values (?, ?)", [str(number), body])
    (folder / "documents.sql").write_text("select doc_id, body from mails")
    files = {}
    for way in ("together", "apart"):
        text, previous = NIGHT.format(model=model, kv_mib=kv_mib), ""
        for name, question in QUESTIONS.items():
            (folder / f"{name}.toml").write_text(WORKLOAD.format(name=name, question=question))
            text += f'[[workload]]\nfile = "{name}.toml"\n'
            text += f'after = "{previous}"\n' if previous and way == "apart" else ""
            previous = name
        files[way] = folder / f"{way}.toml"
        files[way].write_text(text)
    return files


def write_later_files(folder: Path, first: Path) -> dict[str, Path]:
    """Write a first night that keeps prefixes, and two nights with a new question, with and without kept prefixes."""
    keeping = 'kv_memory = "', 'keep_prefixes = "20GB"\nkv_memory = "'
    files = {"first": folder / "first.toml"}
    files["first"].write_text(first.read_text().replace(*keeping))
    ((name, question),) = NEW_QUESTION.items()
    (folder / f"{name}.toml").write_text(WORKLOAD.format(name=name, question=question))
    plain = first.read_text().partition("[[workload]]")[0] + f'[[workload]]\nfile = "{name}.toml"\n'
    for way, text in (("kept", plain.replace(*keeping)), ("computed", plain)):
        files[way] = folder / f"{way}.toml"
        files[way].write_text(text)
    return files


def run_night(
    database: Path, file: Path, *, is_together: bool, names: Iterable[str] = QUESTIONS
) -> tuple[dict[str, float], list[Any]]:
    """Answer all rows again; returns the figures and the answers.

    Args:
        database: of the night file.
        file: the night file.
        is_together: whether each run has the steps of all workloads.
        names: of the workloads.
    """
    summaries = night(file=file, full=True)
    run_ids = [summary.run_id for summary in summaries]
    counted = run_ids[:1] if is_together else run_ids
    with duckdb.connect(str(database)) as connection:
        totals = connection.execute(
            "select sum(duration_ms) / 1000, sum(num_prefix_tokens + num_suffix_tokens)"
            " from steps where list_contains($runs, run_id)",
            {"runs": counted},
        ).fetchall()[0]
        answers = [connection.execute(f"select doc_id, label from latest_{name} order by all").fetchall()
                   for name in names]  # fmt: skip
    return {"seconds": float(totals[0]), "computed_tokens": float(totals[1])}, answers


def compare_ways(
    database: Path, files: Mapping[str, Path], num_rounds: int, wrong: str, **night: Any
) -> dict[str, Any]:
    """Figures of two nights that take turns, after a round that is not counted.

    Args:
        database: of the night files.
        files: by way; the first way should be faster.
        num_rounds: counted rounds.
        wrong: error message if answers differ.
        night: further arguments of `run_night`.
    Raises:
        WrongAnswerError: an answer differs.
    """
    found: dict[str, list[dict[str, float]]] = {way: [] for way in files}
    answers: dict[str, list[Any]] = {}
    for number in range(num_rounds + 1):
        for way, file in in_turn(files.items(), number):
            figures, answers[way] = run_night(database, file, is_together=way != "apart", **night)
            found[way].append(figures)
        first, second = answers.values()
        if first != second:
            raise WrongAnswerError(wrong)
    fast, slow = found.values()
    ratios = [slower["seconds"] / faster["seconds"] for faster, slower in zip(fast, slow, strict=True)]
    return {
        "computed_tokens": {way: rounds[-1]["computed_tokens"] for way, rounds in found.items()},
        "model_seconds": {way: [round(one["seconds"], 2) for one in rounds[1:]] for way, rounds in found.items()},
        "times_as_fast": round(statistics.median(ratios[1:]), 2),
    }


def measure(model: Path, num_documents: int, num_rounds: int, kv_mib: int) -> dict[str, Any]:
    """Figures of both ways; raises `WrongAnswerError` if an answer differs.

    Args:
        model: checkpoint folder.
        num_documents: of about `DOCUMENT_TOKENS` tokens.
        num_rounds: counted rounds.
        kv_mib: memory for KV.
    """
    with tempfile.TemporaryDirectory(prefix="batchloom-nights-") as name:
        files = write_files(Path(name), model, num_documents, kv_mib)
        wrong = "an answer is another one where workloads are planned together"
        found = compare_ways(Path(name) / "night.duckdb", files, num_rounds, wrong)
    return {"num_documents": num_documents, "num_workloads": len(QUESTIONS), **found}


def measure_kept(model: Path, num_documents: int, num_rounds: int, kv_mib: int) -> dict[str, Any]:
    """Figures of a new question with kept prefixes and without. See `measure`."""
    with tempfile.TemporaryDirectory(prefix="batchloom-nights-") as name:
        folder = Path(name)
        files = write_later_files(folder, write_files(folder, model, num_documents, kv_mib)["together"])
        first, _ = run_night(folder / "night.duckdb", files.pop("first"), is_together=True)
        kept_bytes = sum(path.stat().st_size for path in folder.glob("*.runs/prefixes/*.kv"))
        wrong = "an answer is another one where prefixes are read from disk"
        found = compare_ways(folder / "night.duckdb", files, num_rounds, wrong, names=NEW_QUESTION)
    return {
        "num_documents": num_documents,
        "kept_bytes": kept_bytes,
        "first_night_seconds": round(first["seconds"], 2),
        **found,
    }


def measure_deadline(model: Path, num_documents: int, budget: str, kv_mib: int) -> dict[str, Any]:
    """How late two nights with a budget ended; raises `WrongAnswerError` if one had too few rows or repeated one.

    Args:
        model: checkpoint folder.
        num_documents: of about `DOCUMENT_TOKENS` tokens, more than the budget allows.
        budget: as in night files, such as 3min.
        kv_mib: memory for KV.
    """
    seconds, nights = parse_budget(budget), []
    with tempfile.TemporaryDirectory(prefix="batchloom-nights-") as name:
        folder = Path(name)
        file = write_files(folder, model, num_documents, kv_mib)["apart"]
        for _ in range(2):
            started = time.monotonic()
            last = night(file=file, budget=budget)[-1]
            late = (time.monotonic() - started) / seconds - 1
            if last.status != "deadline":
                raise WrongAnswerError("the budget suffices for all rows: give more documents")
            nights.append({"late": round(late, 4)} | check_left(folder / "night.duckdb", last.workload, last.run_id))
    return {"budget_seconds": seconds, "num_documents": num_documents, "nights": nights}


def check_left(database: Path, workload: str, run_id: str) -> dict[str, Any]:
    """Rows that a run was predicted to do and did; raises `WrongAnswerError` if a row is written twice.

    Args:
        database: of the night.
        workload: whose table holds the rows.
        run_id: of its run.
    """
    with duckdb.connect(str(database)) as connection:
        ((num_rows, num_keys),) = connection.execute(
            f"select count(*), count(distinct doc_id) from {workload}"
        ).fetchall()
        query = "select config::text, num_ok, num_unanswered, infer_seconds from runs where run_id = $run"
        ((config, num_ok, num_left, seconds),) = connection.execute(query, {"run": run_id}).fetchall()
    if num_rows != num_keys:
        raise WrongAnswerError(f"{num_rows - num_keys} rows of {workload} are written twice")
    predicted = json.loads(config).get("prediction", {})
    names = ("load_seconds", "num_fitting_rows", "half_time_rows")
    forecast = {name: predicted[name] for name in names if name in predicted}
    return {"num_done": num_ok, "num_left": num_left, "infer_seconds": round(seconds, 2), "forecast": forecast}


@refuse_wrong_answers
def main(command_line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder or GGUF file")
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2, help="counted rounds of both ways")
    parser.add_argument("--kept-prefixes", action="store_true", help="measure a new question with kept KV")
    parser.add_argument("--deadline", metavar="BUDGET", help="measure how late nights of this budget end, e.g. 3min")
    parser.add_argument("--kv-mib", type=int, default=512, help="KV memory")
    parser.add_argument("--out", type=Path, help="file for the JSON result")
    arguments = parser.parse_args(command_line)
    model, machine = find_model(arguments.model), describe_machine()
    with temporary_server():
        if arguments.deadline:
            run = measure_deadline(model, arguments.documents, arguments.deadline, arguments.kv_mib)
        else:
            run = (measure_kept if arguments.kept_prefixes else measure)(
                model, arguments.documents, arguments.rounds, arguments.kv_mib
            )
    report("nights", command_line, arguments.out, machine=machine, model=f"{model.name}, float32", run=run)
    return 0


if __name__ == "__main__":
    atexit.register(end_quietly)
    sys.exit(main())
