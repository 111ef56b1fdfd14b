"""Nights that are killed at any moment, lose unsynced writes, or fill the disk: the next night completes correctly.

``BATCHLOOM_FAULT_POINTS=200`` in the environment tries 200 moments instead of a few; ``BATCHLOOM_FAULT_SEED``
chooses others.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from engine.config import EngineConfig
from tasks.plan_prefix import write_plan
from tasks.read import read
from tasks.runs.infer_job import FailurePolicy
from tasks.runs.run import Run
from tasks.storage.artifact import runs_folder
from tasks.tokenize import read_max_model_len, write_tokens
from tasks.workloads.workload import load_workload
from tests.flows.nights.test_night import REPLIES
from tests.sources import make_job, make_source
from tests.tiny_encoders import save_encoder

ROOT = Path(__file__).parents[2]
NUM_POINTS = int(os.environ.get("BATCHLOOM_FAULT_POINTS", "9"))
SEED = int(os.environ.get("BATCHLOOM_FAULT_SEED", "5"))
OPTIONS = ("--dtype", "float32", "--kv-memory", "8MiB", "--max-num-batched-tokens", "128", "--num-threads", "1")
ANSWERS = "select doc_id, query_id, snippet, status, finish_reason, error from snippets order by all"
WHOLE = ([0, 0], [12, 0], [12, 6])
"""Rows in the two output tables: a workload is written in one transaction."""

SCORES = "select query_id, doc_id, round(score, 3), status, error from rankings order by all"


@dataclass
class Forker:
    """See `forked_nights`."""

    process: "subprocess.Popen[str]"
    output: Path

    def start(self, **order: Any) -> int:
        """Begin; returns the child's process id. `wait` must follow."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"output": str(self.output), **order}, default=str) + "\n")
        self.process.stdin.flush()
        self.output.unlink(missing_ok=True)
        return self._read()

    def wait(self) -> int:
        return self._read()

    def run(self, **order: Any) -> int:
        self.start(**order)
        return self.wait()

    @property
    def said(self) -> str:
        return self.output.read_text()

    def _read(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def forker(prefect_server: str, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_LOCAL_STORAGE_PATH"}
    environment |= {"PREFECT_API_URL": prefect_server, "PYTHONPATH": str(ROOT)}
    program = Path(__file__).with_name("forked_nights.py")
    folder = tmp_path_factory.mktemp("forker")
    with (
        open(folder / "errors", "w") as errors,
        subprocess.Popen(
            [sys.executable, str(program), str(tiny_llama)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", (folder / "errors").read_text()
        yield Forker(process, folder / "output")
        assert process.stdin is not None
        process.stdin.close()


def arguments(database: Path, model: Path) -> list[str]:
    inputs = ["--database", str(database), "--model", str(model), "--publish", f"{database}.copy"]
    return [*inputs, *OPTIONS, "--partition-tokens", "400", "--retry-delay-seconds", "0"]


def read_rows(database: Path | str) -> list[list[tuple[Any, ...]]]:
    """Every row of the output tables, not only the newest, so that one written twice shows."""
    with duckdb.connect(str(database), read_only=True) as connection:
        return [connection.execute(query).fetchall() for query in (ANSWERS, SCORES)]


def lose_what_was_not_synced(database: Path, calls: Path) -> None:
    """Simulate a power loss: files renamed or written but not fsynced become empty, except the database."""
    safe = {int(line.split()[2]) for line in calls.read_text().splitlines() if line.split()[1] == "fsync"}
    for path in runs_folder(database).rglob("*"):
        if path.is_file() and path.stat().st_ino not in safe:
            os.truncate(path, 0)


def check_end(database: Path, expected: list[list[tuple[Any, ...]]], *ends: str) -> None:
    """The database and its copy hold these rows once, runs have these states, and no temporary files are left."""
    assert read_rows(database) == expected
    assert read_rows(f"{database}.copy") == expected
    with duckdb.connect(str(database), read_only=True) as connection:
        statuses = connection.execute("select distinct status from runs").fetchall()
        assert {status for (status,) in statuses} <= {"completed", *ends}
        last = "select workload, arg_max(status, started_at) from runs group by workload order by all"
        assert connection.execute(last).fetchall() == [("ranking", "completed"), ("snippets", "completed")]
        (num_rows,) = connection.execute("select sum(num_ok + num_errors) from runs").fetchone() or (0,)
        assert num_rows == sum(map(len, expected))
    assert find_leftovers(database) == []


def find_leftovers(database: Path) -> list[Path]:
    """Files that ended nights should not have left."""
    folder = runs_folder(database)
    leftovers = [path for path in folder.rglob("*.tmp") if path.parent.name != "cache"]
    leftovers += [path for name in ("parts", "attempts", "requests.parquet") for path in folder.glob(f"*/{name}")]
    leftovers += [path for path in folder.glob("2*") if not (path / "manifest.json").exists()]
    return leftovers + list(database.parent.glob(".*.tmp"))


def test_a_night_killed_at_any_moment_is_ended_by_the_next(nights: Any, forker: Forker, tmp_path: Path) -> None:
    nights.sql("insert into snippet_requests values ('d-gone', 'q0')")
    calls, random_ = tmp_path / "calls", random.Random(SEED)
    undisturbed = tmp_path / "undisturbed.duckdb"
    shutil.copyfile(nights.path, undisturbed)
    started = time.monotonic()
    assert forker.run(arguments=arguments(undisturbed, nights.model), calls=str(calls)) == 0, forker.said
    seconds, num_calls = time.monotonic() - started, len(calls.read_text().splitlines())
    expected = read_rows(undisturbed)
    assert [len(rows) for rows in expected] == [13, 6]
    check_end(undisturbed, expected)

    num_killed = 0
    for point in range(NUM_POINTS):
        kind = ("before", "after", "time")[point % 3]
        where = (point // 3 + random_.random()) / -(-NUM_POINTS // 3)  # evenly over the night, for each kind
        database = tmp_path / f"{point}" / "team.duckdb"
        database.parent.mkdir()
        shutil.copyfile(nights.path, database)
        order = {"arguments": arguments(database, nights.model), "calls": str(calls)}
        if kind == "time":
            child = forker.start(**order)
            time.sleep(where * seconds)
            with suppress(ProcessLookupError):  # it was quicker this time
                os.kill(child, signal.SIGKILL)
        else:
            forker.start(**order, kill=(1 + int(where * num_calls), kind))
        status = forker.wait()
        assert status in (-signal.SIGKILL, 0), forker.said
        num_killed += status != 0
        is_power_loss = random_.random() < 0.5
        if is_power_loss:
            lose_what_was_not_synced(database, calls)
        for path in (database, Path(f"{database}.copy")):
            assert not path.exists() or read_rows(path) is not None
        what = f"point {point}: {kind} {where:.3f}, power loss {is_power_loss}"
        assert forker.run(arguments=order["arguments"], num_spares=2) == 0, f"{what}\n{forker.said}"
        try:
            check_end(database, expected, "interrupted")
        except AssertionError as error:
            error.add_note(f"{what}\n{forker.said}")
            raise
        shutil.rmtree(database.parent)
    print(f"{num_killed} of {NUM_POINTS} nights of {num_calls} durable calls and {seconds:.1f} s were killed")
    assert num_killed >= NUM_POINTS * 2 // 3


DECIDE = """
name = "facets"
mode = "decide"
requests_sql = "select_facet_requests.sql"
key = ["doc_id"]
[prompt]
template = "Read this: {body}"
[output]
table = "facets"
[questions]
tall = { type = "BOOLEAN", ask = "Is it tall?" }
kind = { type = "ENUM('tower', 'house')", ask = "What is it?" }
"""
ADDED = 'size = { type = "SCORE(1, 5)", ask = "How large is it?" }\n'
DECISIONS = (
    "select doc_id, tall, round(tall_probability, 3), kind, {size}, status, error, num_prompt_tokens,"
    " map_values(question_states).list_transform(lambda state: state.finish_reason) from facets order by all"
)


def test_questions_of_a_killed_night_are_asked_once(nights: Any, forker: Forker, tmp_path: Path) -> None:
    """Rows count the tokens of the prompts that they were asked, so that a question that is asked again shows."""
    nights.add_towers(4)
    calls, random_ = tmp_path / "calls", random.Random(SEED + 1)
    workload = tmp_path / "facets.toml"
    bases, expected, num_calls = [nights.path], [], []
    for number, text in enumerate((DECIDE, DECIDE + ADDED)):
        workload.write_text(text)
        night = tmp_path / f"undisturbed-{number}" / "team.duckdb"
        night.parent.mkdir()
        shutil.copyfile(bases[-1], night)
        command = [*arguments(night, nights.model), "--workload", str(workload)]
        assert forker.run(arguments=command, calls=str(calls)) == 0, forker.said
        bases.append(night)
        expected.append(read_decisions(night, has_size=number == 1))
        num_calls.append(len(calls.read_text().splitlines()))
    assert [len(rows) for rows in expected] == [8, 16], "a row of its own where a question was added"
    assert all(status == "ok" for rows in expected for *_, status, _, _, _ in rows)

    num_killed = 0
    for point in range(NUM_POINTS // 4):
        number = point % 2
        workload.write_text((DECIDE, DECIDE + ADDED)[number])
        database = tmp_path / f"{point}" / "team.duckdb"
        database.parent.mkdir()
        shutil.copyfile(bases[number], database)
        command = [*arguments(database, nights.model), "--workload", str(workload)]
        kind = ("before", "after")[(point + point // 2) % 2]
        kill = (1 + int((0.3 + 0.6 * random_.random()) * num_calls[number]), kind)
        num_killed += forker.run(arguments=command, calls=str(calls), kill=kill) == -signal.SIGKILL
        assert forker.run(arguments=command) == 0, forker.said
        assert read_decisions(database, has_size=number == 1) == expected[number], f"{point}: {kill}\n{forker.said}"
        assert read_decisions(f"{database}.copy", has_size=number == 1) == expected[number]
        assert find_leftovers(database) == []
    assert num_killed == NUM_POINTS // 4


def read_decisions(database: Path | str, *, has_size: bool) -> list[tuple[Any, ...]]:
    """Every row of the table, not only the newest."""
    with duckdb.connect(str(database), read_only=True) as connection:
        return connection.execute(DECISIONS.format(size="round(size, 3)" if has_size else "null")).fetchall()


EMBED = """
name = "embeddings"
mode = "embed"
requests_sql = "select_documents.sql"
key = ["doc_id"]
[prompt]
template = "{body}"
[output]
table = "document_embeddings"
"""
EMBEDDINGS = "select doc_id, embedding::varchar, status, error, num_prompt_tokens from document_embeddings order by all"


def test_a_killed_night_of_embeddings_goes_on(nights: Any, forker: Forker, tmp_path: Path) -> None:
    nights.add_towers(8)
    model = save_encoder("bert", tmp_path / "model")
    (tmp_path / "select_documents.sql").write_text("select doc_id, body from documents")
    workload = tmp_path / "embeddings.toml"
    workload.write_text(EMBED)
    calls, random_ = tmp_path / "calls", random.Random(SEED + 2)
    expected: list[tuple[Any, ...]] = []
    num_calls = num_killed = 0
    for point, kind in enumerate(("never", "before", "after")):
        database = tmp_path / f"{point}" / "team.duckdb"
        database.parent.mkdir()
        shutil.copyfile(nights.path, database)
        order: dict[str, Any] = {"arguments": [*arguments(database, model), "--workload", str(workload)]}
        order["arguments"] += ["--partition-tokens", "150"]
        if num_calls:
            kill = (1 + int((0.3 + 0.6 * random_.random()) * num_calls), kind)
            num_killed += forker.run(**order, calls=str(calls), kill=kill) == -signal.SIGKILL
        assert forker.run(**order, calls=str(calls)) == 0, forker.said
        num_calls = num_calls or len(calls.read_text().splitlines())
        with duckdb.connect(str(database), read_only=True) as connection:
            rows = connection.execute(EMBEDDINGS).fetchall()
            (num_written,) = connection.execute("select sum(num_ok) from runs").fetchone() or (0,)
        expected = expected or rows
        assert len({doc_id for doc_id, *_ in rows}) == len(rows) == num_written == 12
        assert all(status == "ok" and embedding for _, embedding, status, *_ in rows)
        assert rows == expected, f"{kind}\n{forker.said}"
        assert find_leftovers(database) == []
    assert num_killed == 2


@pytest.mark.parametrize(("retries", "expected_deaths"), [(0, 7), (1, 11)])
def test_a_row_that_kills_its_process_is_found_by_those_that_follow(
    nights: Any, forker: Forker, tmp_path: Path, retries: int, expected_deaths: int
) -> None:
    """Each process goes on in the same run folder, as a worker does that takes over another one's partition."""
    nights.sql("update documents set body = body || '~' where doc_id = 'd2'")
    workload = load_workload("snippets")
    run = Run.begin(make_source(nights.path), workload, {})
    requests = read.fn(make_source(nights.path), workload, run.folder).requests
    model_len = read_max_model_len(nights.model, "auto")
    tokens = write_tokens(
        requests, str(tmp_path / "tokens.parquet"), load_workload("snippets"), nights.model, model_len
    )
    plan = write_plan(tokens, str(tmp_path / "plan.parquet"), "exact", 10_000_000, 48)
    engine = EngineConfig(dtype="float32", kv_memory_bytes=8 << 20, num_threads=1)
    failures = FailurePolicy(retries=retries)
    job = make_job(run.folder, workload, nights.model, plan=plan, engine=engine, failures=failures)
    (poison,) = AutoTokenizer.from_pretrained(nights.model)("~", add_special_tokens=False).input_ids
    num_deaths, parts = 0, []
    while (status := forker.run(infer=(0, asdict(job)), poison=poison)) != 0:
        assert status == -signal.SIGKILL, forker.said
        num_deaths += 1
        before, parts = parts, run.list_parts()
        assert [part for part in parts if part in before] == before, "a finished piece was made again"
    pieces = "the whole, a half, a document, its three rows two at a time and each alone"
    assert num_deaths == expected_deaths, f"{pieces}; retries are for the whole and for those alone"
    table = pq.ParquetDataset([part.path for part in run.list_parts()]).read()
    rows = {row["row_id"]: row["error"] for row in table.to_pylist()}
    texts = pq.read_table(requests.path, columns=["row_id", "doc_id"]).to_pylist()
    assert table.num_rows == len(rows) == 12
    for row in texts:
        reason = "the process that tried it ended each time" if row["doc_id"] == "d2" else None
        assert rows[row["row_id"]] == reason, row


@pytest.mark.slow
def test_nights_that_a_row_kills_end_with_it_as_an_error_row(nights: Any, forker: Forker, tmp_path: Path) -> None:
    """After the night that it killed, engines have a process of their own until a night comes through without it."""
    nights.sql("insert into queries values ('q-poison', 'What is ~?')")
    nights.sql("delete from snippet_requests where doc_id = 'd0' and query_id <> 'q0'")
    nights.sql("insert into snippet_requests values ('d0', 'q-poison')")
    (poison,) = AutoTokenizer.from_pretrained(nights.model)("~", add_special_tokens=False).input_ids
    undisturbed = tmp_path / "undisturbed.duckdb"
    shutil.copyfile(nights.path, undisturbed)
    assert forker.run(arguments=arguments(undisturbed, nights.model)) == 0, forker.said
    expected = read_rows(undisturbed)

    command = [*arguments(nights.path, nights.model), "--retries", "0"]
    assert forker.run(arguments=command, poison=poison) == -signal.SIGKILL, forker.said
    assert forker.run(arguments=command, poison=poison) == 0, forker.said
    snippets, rankings = read_rows(nights.path)
    failed = [(doc_id, query_id, error) for doc_id, query_id, _, status, _, error in snippets if status == "error"]
    assert failed == [("d0", "q-poison", "the process that tried it ended each time")]
    assert rankings == expected[1]
    assert len(snippets) == len(expected[0]) == 11
    assert [row for row in snippets if row[1] != "q-poison"] == [row for row in expected[0] if row[1] != "q-poison"]
    (mark,) = runs_folder(nights.path).glob("guarded-*")
    assert mark.name == "guarded-snippets"

    inputs = ["--database", str(nights.path), "--model", str(nights.model)]
    sample = [*inputs, *OPTIONS, "--workload", "snippets", "--sample", "1"]
    assert forker.run(arguments=sample) == 0, forker.said
    assert mark.exists(), "a sample tries some rows only"
    assert forker.run(arguments=[*sample, "--keep"]) == 0, forker.said
    assert mark.exists(), "as does one whose answers are kept"

    assert forker.run(arguments=[*command, "--workload", "snippets", "--full"]) == 0, forker.said
    assert not mark.exists()
    with duckdb.connect(str(nights.path), read_only=True) as connection:
        assert connection.execute("select count(*) from latest_snippets where status = 'ok'").fetchone() == (11,)


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """A file system of this size at `folder`; skips the test where this user may not mount one."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no tmpfs: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("spare", [20_000, 700_000])
def test_a_full_disk_is_named_and_the_next_night_goes_on(
    nights: Any, forker: Forker, tmp_path: Path, spare: int
) -> None:
    """Full while the rows are read, or when the answers are written."""
    size, folder = nights.path.stat().st_size, tmp_path / "disk"
    with small_disk(folder, size + spare):
        database = folder / "team.duckdb"
        shutil.copyfile(nights.path, database)
        assert forker.run(arguments=arguments(database, nights.model)) == 1, forker.said
        (line,) = [line for line in forker.said.splitlines() if line.startswith("nightly: ")]
        assert re.search(rf"{folder}/.*: No space left on device; [\d,]+ bytes free in {folder}", line), line
        assert [len(rows) for rows in read_rows(database)] in WHOLE
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        assert forker.run(arguments=arguments(database, nights.model)) == 0, forker.said
        rows = read_rows(database)
        check_end(database, rows, "failed", "interrupted")
    assert [len(part) for part in rows] == [12, 6]


@pytest.mark.slow
def test_a_database_that_may_not_grow_is_named_and_the_next_night_goes_on(nights: Any, forker: Forker) -> None:
    """A limit of the operating system on the size of a file, as a quota is: DuckDB's write-ahead log does not fit."""
    command = arguments(nights.path, nights.model)
    assert forker.run(arguments=command, file_bytes=1 << 15) == 1, forker.said
    (line,) = [line for line in forker.said.splitlines() if line.startswith("nightly: ")]
    why = rf"{nights.path}\.wal\": File too large; [\d,]+ bytes free in {nights.path.parent}"
    assert re.search(rf"^nightly: {nights.path}: .*{why}; the answers stay in ", line), line
    assert read_rows(nights.path) == [[], []]
    assert forker.run(arguments=command) == 0, forker.said
    assert [len(rows) for rows in read_rows(nights.path)] == [12, 6]


NIGHT = """
database = "{database}"
[models.small]
path = "{small}"
dtype = "float32"
kv_memory = "8MiB"
max_num_batched_tokens = 128
num_threads = 1
[models.large]
path = "{large}"
dtype = "float32"
kv_memory = "8MiB"
max_num_batched_tokens = 128
num_threads = 1
[planning]
partition_tokens = 400
[failures]
retries = 0
[[workload]]
file = "snippets"
model = "large"
after = "ranking"
[[workload]]
file = "ranking"
model = "small"
cascade = {{ to = "large", below = {below} }}
"""

BY_MODEL = "select query_id, doc_id, round(score, 3), status, model from latest_rankings order by all"


@pytest.fixture
def write_cascade(nights: Any, tiny_checkpoint: Any, tmp_path: Path) -> Any:
    """Write a night file in which about half of the ranked rows go on to the large model."""

    def write(database: Path, below: float) -> list[str]:
        models = {"small": nights.model, "large": tiny_checkpoint("qwen2")}
        file = tmp_path / f"{database.parent.name}.toml"
        file.write_text(NIGHT.format(database=database, below=repr(below), **models))
        return ["nightly", str(file)]

    return write


def read_cascade(database: Path) -> list[list[tuple[Any, ...]]]:
    """What an analyst sees, and how often each model has answered a row."""
    often = "select max(num) from (select count(*) as num from rankings group by query_id, doc_id, model)"
    with duckdb.connect(str(database), read_only=True) as connection:
        return [connection.execute(query).fetchall() for query in (BY_MODEL, ANSWERS, often)]


def find_median(database: Path) -> float:
    with duckdb.connect(str(database), read_only=True) as connection:
        query = "select median(exp(list_max(label_logprobs))) from rankings where status = 'ok'"
        return float((connection.execute(query).fetchone() or (0,))[0])


@pytest.mark.slow
def test_a_cascade_killed_at_any_moment_is_ended_by_the_next_night(
    nights: Any, forker: Forker, write_cascade: Any, tmp_path: Path
) -> None:
    calls, random_ = tmp_path / "calls", random.Random(SEED)
    undisturbed = tmp_path / "whole" / "team.duckdb"
    undisturbed.parent.mkdir()
    shutil.copyfile(nights.path, undisturbed)
    alone = [*arguments(undisturbed, nights.model), "--workload", "ranking"]
    assert forker.run(arguments=alone) == 0, forker.said
    below = find_median(undisturbed)
    shutil.rmtree(undisturbed.parent)
    undisturbed.parent.mkdir()
    shutil.copyfile(nights.path, undisturbed)
    assert forker.run(arguments=write_cascade(undisturbed, below), calls=str(calls)) == 0, forker.said
    expected, num_calls = read_cascade(undisturbed), len(calls.read_text().splitlines())
    assert [len(rows) for rows in expected] == [6, 12, 1]
    assert len({model for *_, model in expected[0]}) == 2
    assert expected[2] == [(1,)]
    for point in range(max(3, NUM_POINTS // 3)):
        kind, where = ("before", "after")[point % 2], (point + random_.random()) / max(3, NUM_POINTS // 3)
        database = tmp_path / f"{point}" / "team.duckdb"
        database.parent.mkdir()
        shutil.copyfile(nights.path, database)
        order = {"arguments": write_cascade(database, below), "calls": str(calls)}
        assert forker.run(**order, kill=(1 + int(where * num_calls), kind)) == -signal.SIGKILL, forker.said
        if random_.random() < 0.5:
            lose_what_was_not_synced(database, calls)
        assert forker.run(arguments=order["arguments"]) == 0, forker.said
        assert read_cascade(database) == expected, f"point {point}: {kind} {where:.3f}\n{forker.said}"


@pytest.mark.slow
def test_a_night_with_a_deadline_killed_at_any_moment_is_ended_by_the_next(
    nights: Any, forker: Forker, write_cascade: Any, tmp_path: Path
) -> None:
    """The deadline comes in the first step of the graph or in a later one, as far as the night gets before the kill."""
    calls, random_ = tmp_path / "calls", random.Random(SEED + 2)
    bases = {name: tmp_path / name / "team.duckdb" for name in ("whole", "cut")}
    num_steps, num_calls = {"whole": 10**6}, dict[str, int]()
    for name, database in bases.items():
        database.parent.mkdir()
        shutil.copyfile(nights.path, database)
        order = {"arguments": [*write_cascade(database, 1.0), "--budget", "1h"], "num_steps": num_steps[name]}
        assert forker.run(**order, calls=str(calls)) == 0, forker.said
        num_calls[name] = len(calls.read_text().splitlines())
        with duckdb.connect(str(database), read_only=True) as connection:
            (num_done,) = connection.execute("select count(*) from steps").fetchone() or (0,)
            ends = connection.execute("select status from runs order by started_at, run_id").fetchall()
        num_steps["cut"] = num_done // 2
        assert (("deadline",) in ends) == (name == "cut")
    expected = read_cascade(bases["whole"])
    assert [len(rows) for rows in expected] == [6, 12, 1]
    assert read_cascade(bases["cut"])[:2] != expected[:2], "the deadline has left rows"
    assert forker.run(arguments=write_cascade(bases["cut"], 1.0)) == 0, forker.said
    assert read_cascade(bases["cut"]) == expected, "what the deadline left is answered by the next night, once"
    for point in range(NUM_POINTS // 4):
        name, kind = ("whole", "cut")[point % 2], ("before", "after")[(point + point // 2) % 2]
        number = 1 + int((0.2 + 0.7 * random_.random()) * num_calls[name])
        database = tmp_path / f"{point}" / "team.duckdb"
        database.parent.mkdir()
        shutil.copyfile(nights.path, database)
        order = {"arguments": [*write_cascade(database, 1.0), "--budget", "1h"], "num_steps": num_steps[name]}
        assert forker.run(**order, calls=str(calls), kill=(number, kind)) == -signal.SIGKILL, forker.said
        assert forker.run(arguments=order["arguments"]) == 0, forker.said
        assert read_cascade(database) == expected, f"point {point}: {name} {kind} {number}\n{forker.said}"


@pytest.mark.slow
@pytest.mark.parametrize("limit", [(), ("--budget", "1h")])
def test_a_row_that_kills_both_models_is_an_error_row_of_a_cascade(
    nights: Any, forker: Forker, write_cascade: Any, limit: tuple[str, ...]
) -> None:
    """Found by the small model in a process of its own; the large one, which gets it next, has one from the start."""
    nights.sql("insert into queries values ('q-poison', 'What is ~?')")
    nights.sql("insert into ranking_candidates values ('q-poison', 'd0')")
    (poison,) = AutoTokenizer.from_pretrained(nights.model)("~", add_special_tokens=False).input_ids
    command = [*write_cascade(nights.path, 0.000001), *limit]
    assert forker.run(arguments=command, poison=poison) == -signal.SIGKILL, forker.said
    assert forker.run(arguments=command, poison=poison, num_spares=5) == 0, forker.said
    rankings, snippets, often = read_cascade(nights.path)
    assert [row[:2] for row in rankings if row[3] == "error"] == [("q-poison", "d0")]
    assert (len(rankings), len(snippets), often) == (7, 12, [(1,)])


@pytest.mark.parametrize("limit", [(), ("--budget", "1h")])
def test_a_cascade_on_a_full_disk_goes_on_when_there_is_room(
    nights: Any, forker: Forker, write_cascade: Any, tmp_path: Path, limit: tuple[str, ...]
) -> None:
    folder = tmp_path / "disk"
    with small_disk(folder, nights.path.stat().st_size + 300_000):
        database = folder / "team.duckdb"
        shutil.copyfile(nights.path, database)
        command = [*write_cascade(database, 1.0), *limit]
        assert forker.run(arguments=command) == 1, forker.said
        assert "No space left on device" in forker.said
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        assert forker.run(arguments=command) == 0, forker.said
        rankings, snippets, often = read_cascade(database)
    assert (len(rankings), len(snippets), often) == (6, 12, [(1,)])
    assert {Path(model).name.startswith("tiny-qwen2") for *_, model in rankings} == {True}


GRAPH = """
database = "{database}"
[models.small]
path = "{model}"
dtype = "float32"
kv_memory = "8MiB"
max_num_batched_tokens = 128
num_threads = 1
[planning]
partition_tokens = 400
[failures]
retries = 0
[[workload]]
file = "replies.toml"
after = "snippets"
[[workload]]
file = "snippets"
after = "ranking"
[[workload]]
file = "ranking"
"""


def write_graph(database: Path, model: Path, folder: Path) -> list[str]:
    """Three steps, each after the one before it; the last reads the answers of the second."""
    (folder / "replies.toml").write_text(REPLIES)
    (folder / "replies.sql").write_text("select doc_id, query_id, snippet from latest_snippets where status = 'ok'")
    file = folder / "graph.toml"
    file.write_text(GRAPH.format(database=database, model=model))
    return ["nightly", str(file)]


def count_answers(database: Path) -> list[list[tuple[Any, ...]]]:
    """Of each step's table the rows, the keys, the rows without error."""
    count = "select count(*), count(distinct (doc_id, query_id)), count(*) filter (status = 'ok') from {}"
    with duckdb.connect(str(database), read_only=True) as connection:
        return [connection.execute(count.format(table)).fetchall() for table in ("rankings", "snippets", "replies")]


@pytest.mark.slow
def test_a_row_that_kills_a_step_of_a_graph_is_an_error_row_of_each_step_that_reads_it(
    nights: Any, forker: Forker, tmp_path: Path
) -> None:
    """The night ends in its first step; in the next one what the row has not reached comes through, step by step."""
    nights.sql("insert into queries values ('q-poison', 'What is ~?')")
    nights.sql("insert into ranking_candidates values ('q-poison', 'd0')")
    nights.sql("insert into snippet_requests values ('d0', 'q-poison')")
    (poison,) = AutoTokenizer.from_pretrained(nights.model)("~", add_special_tokens=False).input_ids
    command = write_graph(nights.path, nights.model, tmp_path)
    assert forker.run(arguments=command, poison=poison) == -signal.SIGKILL, forker.said
    assert forker.run(arguments=command, poison=poison, num_spares=6) == 0, forker.said
    assert count_answers(nights.path) == [[(7, 7, 6)], [(13, 13, 12)], [(12, 12, 12)]]


def test_a_graph_on_a_full_disk_goes_on_when_there_is_room(nights: Any, forker: Forker, tmp_path: Path) -> None:
    """Steps that come after the one that had no room are not begun; the next night does each row once."""
    folder = tmp_path / "disk"
    with small_disk(folder, nights.path.stat().st_size + 300_000):
        database = folder / "team.duckdb"
        shutil.copyfile(nights.path, database)
        command = write_graph(database, nights.model, tmp_path)
        assert forker.run(arguments=command) == 1, forker.said
        assert "No space left on device" in forker.said
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        assert forker.run(arguments=command) == 0, forker.said
        assert count_answers(database) == [[(6, 6, 6)], [(12, 12, 12)], [(12, 12, 12)]]
