"""Twenty nights of random graphs with cascades over a fake clock: real tables, simulated models, kills, deadlines."""

import hashlib
import math
import random
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.cascades.cascade import Cascade
from tasks.cascades.certificate import certify
from tasks.cascades.row_choice import RowChoice
from tasks.database.connection import connect
from tasks.database.schema import create_schema
from tasks.nights.cascade_steps import CascadeStep, add_cascades
from tasks.nights.graph import NightStep, Outcome, Wave, run_waves
from tasks.partitions.part import part_schema
from tasks.read import read
from tasks.runs.run import Run, make_runs_folder
from tasks.storage.artifact import write_parquet
from tasks.workloads.workload import Workload, load_workload
from tasks.write import write_run
from tests.sources import make_source

WORKLOAD = """
name = "{name}"
mode = "score"
requests_sql = "{name}.sql"
key = ["doc_id"]
labels = ["a", "b", "c"]
[prompt]
chat = false
template = "{{body}}"
[output]
table = "{name}"
"""

NUM_NIGHTS = 5
CASCADES = (
    None,
    Cascade(to="large", below=0.7),
    Cascade(to="large", target_agreement=0.8, sample=20),
    Cascade(to="large", target_agreement=0.9, sample=30),
)


class KilledError(Exception):
    """The night's process has ended."""


def draw(*texts: str) -> float:
    """0 to 1, always the same for the same texts."""
    return int(hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12], 16) / 16**12


def say(model: str, body: str) -> tuple[str, float]:
    """Label and probability; the small model says what the large one does the more often, the surer it is."""
    label, confidence = "abc"[int(3 * draw("label", body))], 0.4 + 0.6 * draw(model, body)
    if model == "small" and draw("error", body) > 0.3 + 0.7 * confidence:
        label = "abc"[("abc".index(label) + 1) % 3]
    return label, confidence


class Nights:
    """A database, a graph that stays the same, and nights over them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.database = folder / "team.duckdb"
        self.sql("create table docs as select 'd' || i as doc_id, 'text ' || i as body from range(60) as docs (i)")
        make_runs_folder(self.database)
        steps, workloads, cascades = [], {}, {}
        for number in range(3):
            name, before = f"w{number}", [f"w{other}" for other in range(number) if self.random.random() < 0.5]
            joins = "".join(f" left join latest_{other} as {other} using (doc_id)" for other in before)
            parts = ["docs.body", *(f"coalesce({other}.label, '?')" for other in before)]
            (folder / f"{name}.sql").write_text(f"select doc_id, {' || '.join(parts)} as body from docs{joins}")
            (folder / f"{name}.toml").write_text(WORKLOAD.format(name=name))
            workloads[name] = load_workload(folder / f"{name}.toml")
            cascade = self.random.choice(CASCADES)
            model = "small" if cascade else self.random.choice(["small", "large"])
            steps.append(NightStep(name=name, model=model, after=tuple(before)))
            cascades |= {name: cascade} if cascade else {}
        self.before = {step.name: step.after for step in steps}
        self.models = {step.name: step.model for step in steps}
        self.steps, self.workloads, self.roles = add_cascades(steps, workloads, cascades)
        self.clock = 0.0
        self.deadline = math.inf
        self.num_until_kill = math.inf

    def sql(self, text: str) -> list[tuple[Any, ...]]:
        with duckdb.connect(str(self.database)) as connection:
            return connection.execute(text).fetchall()

    def change_rows(self) -> None:
        self.sql(f"delete from docs where hash(doc_id || {self.clock}) % 12 = 0")
        self.sql(f"update docs set body = body || '!' where hash(doc_id || {self.clock}) % 10 = 1")
        new = (
            f"select 'n' || {int(self.clock)} || '-' || i, 'new ' || i from range({self.random.randrange(12)}) as x (i)"
        )
        self.sql(f"insert into docs {new}")

    def run(self) -> dict[str, Outcome]:
        return run_waves(self.steps, self.answer, lambda: self.clock < self.deadline)

    def answer(self, wave: Wave) -> dict[str, Outcome]:
        return {name: self.answer_step(self.workloads[name], wave.model) for name in wave.steps}

    def answer_step(self, workload: Workload, model: str) -> Outcome:
        """Read, answer a row a second, write what was finished; as the flow does, with or without a kill."""
        choice = self.choose(workload.name, self.roles.get(workload.name))
        choices = {} if choice is None else {workload.name: choice}
        source = make_source(self.database, f"digest of {model}", model=model, choices=choices)
        run = Run.begin(source, workload, {})
        found = read.fn(source, workload, run.folder)
        if not found.num_selected:
            shutil.rmtree(run.folder)
            return "done"
        rows = pq.read_table(found.requests.path).to_pylist()
        num_done = int(max(0, min(len(rows), self.deadline - self.clock, self.num_until_kill)))
        self.clock += num_done
        self.num_until_kill -= num_done
        schema = part_schema(workload.kind)
        write_parquet(
            Path(run.folder) / "parts" / "part-0.parquet",
            schema,
            [pa.RecordBatch.from_pylist([answer_row(row, model) for row in rows[:num_done]], schema=schema)],
        )
        run.note({"requests": found.requests})
        write_run(run, workload)
        if num_done < len(rows) and self.clock < self.deadline:
            raise KilledError
        return "left" if num_done < len(rows) else "done"

    def choose(self, name: str, step: CascadeStep | None) -> RowChoice | None:
        if step is None:
            return None
        threshold, cascade = step.cascade.below, step.cascade
        if step.role == "unsure" and cascade.num_sampled:
            digests = ("digest of small", "digest of large")
            threshold = certify.fn(str(self.database), self.workloads[name], cascade, digests, {})[0]
        return RowChoice(
            role=step.role, model_digest="digest of small", num_sampled=cascade.num_sampled, threshold=threshold
        )

    def check(self) -> None:
        """Each row has the answer that the cascade gives it, from the texts that the steps before have made."""
        bodies = dict(self.sql("select doc_id, body from docs"))
        labels: dict[str, dict[str, str]] = {}
        for name, before in self.before.items():
            texts = {key: body + "".join(labels[other][key] for other in before) for key, body in bodies.items()}
            found = {key: rest for key, *rest in self.sql(f"select doc_id, label, model, status from latest_{name}")}
            assert found.keys() == texts.keys()
            threshold, sampled = self.find_threshold(name)
            has_sample = name in self.roles and self.roles[name].cascade.num_sampled
            for key, text in texts.items():
                model = self.models[name]
                if name in self.roles and (key in sampled or say("small", text)[1] < threshold):
                    model = "large"
                elif has_sample and found[key][1] == "large":
                    model = "large"  # a row of an earlier night's sample, or one that its threshold sent
                assert found[key] == [say(model, text)[0], model, "ok"], (name, key)
            labels[name] = {key: label for key, (label, *_) in found.items()}

    def find_threshold(self, name: str) -> tuple[float, set[str]]:
        """And the keys of the sample."""
        if name not in self.roles:
            return 0.0, set()
        if (below := self.roles[name].cascade.below) is not None:
            return below, set()
        ((threshold, sample),) = self.sql(
            f"select threshold, sample from certificates where workload = '{name}-large' order by created_at desc"
            " limit 1"
        )
        return (math.inf if threshold is None else threshold), {entry["request_key"][0] for entry in sample}

    def check_once(self) -> None:
        """No model was asked the same twice, unless the row was another one, or the small model's, in between."""
        for name in self.before:
            answers = self.sql(f"select doc_id, content_key from {name} order by doc_id, created_at, run_id")
            pairs = pairwise(answers)
            assert all(one != other for one, other in pairs), "two answers to the same, one after the other"


def answer_row(row: dict[str, Any], model: str) -> dict[str, Any]:
    label, confidence = say(model, row["body"])
    logprobs = [math.log(confidence if each == label else (1 - confidence) / 2) for each in "abc"]
    counts = {"num_prompt_tokens": 1, "num_cached_tokens": 0, "num_output_tokens": 0, "compute_ms": 0.0}
    answer = {"score": math.exp(logprobs[0]), "label": label, "label_logprobs": logprobs}
    return {"row_id": row["row_id"], "finish_reason": "scored", "prefix_group": 0, **answer, **counts}


@pytest.mark.parametrize("table", ["docs", "measured", "listed", "newest"])
def test_the_query_may_read_a_table_of_any_name(tmp_path: Path, table: str) -> None:
    (tmp_path / "w.sql").write_text(f"select doc_id, body from {table}")
    (tmp_path / "w.toml").write_text(WORKLOAD.format(name="w"))
    workload = load_workload(tmp_path / "w.toml")
    with connect(tmp_path / "team.duckdb", create=True) as connection:
        connection.execute(f"create table {table} as select 'd1' as doc_id, 'text' as body")
        create_schema(connection, workload)
        connection.execute("insert into runs (run_id, model_digest) values ('r', 'small')")
        answers = "select id, 'a', [ln(0.5)], 'ok', 'r' from unnest(['d1', 'gone']) as ids (id)"
        connection.execute(f"insert into w (doc_id, label, label_logprobs, status, run_id) {answers}")
        RowChoice(role="unsure", model_digest="small", threshold=0.7).prepare(connection, workload)
        assert connection.execute("select request_key from batchloom_chosen_rows").fetchall() == [(["d1"],)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_nights_of_random_graphs(tmp_path: Path, seed: int) -> None:
    nights = Nights(tmp_path, seed)
    num_disturbed = 0
    for number in range(NUM_NIGHTS):
        nights.deadline = nights.clock + nights.random.choice([math.inf, nights.random.randrange(1, 250)])
        nights.num_until_kill = nights.random.choice([math.inf, nights.random.randrange(250)]) if number else 100
        try:
            is_whole = set(nights.run().values()) == {"done"}
        except KilledError:
            is_whole = False
        num_disturbed += not is_whole
        nights.deadline = nights.num_until_kill = math.inf
        assert is_whole or set(nights.run().values()) == {"done"}
        nights.check()
        nights.check_once()
        nights.change_rows()
    assert num_disturbed
