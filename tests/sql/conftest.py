"""A real database file and a night's run over it, with answers given by the test instead of a model."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from tasks.database.connection import connect
from tasks.database.schema import create_schema
from tasks.partitions.part import STEPS_SCHEMA, part_schema
from tasks.read import ReadResult, read
from tasks.runs import run as runs
from tasks.runs.run import new_run_id
from tasks.runs.run_record import RunRecord
from tasks.runs.run_summary import RunSummary
from tasks.storage.artifact import ArtifactRef, open_parquet, write_parquet
from tasks.storage.schemas import TOKENS_SCHEMA
from tasks.workloads.workload import Workload, load_workload
from tasks.write import write_run
from tests.sources import make_source
from tests.sql.report_facts import CONFIG, Step, replace_steps

Row = dict[str, Any]
Answer = Callable[[Row], Row | None]


def write_rows(path: Path, schema: pa.Schema, rows: Sequence[Row]) -> ArtifactRef:
    return write_parquet(path, schema, [pa.RecordBatch.from_pylist(list(rows), schema=schema)])


def echo(row: Row) -> Row:
    """An answer that names its content."""
    return {"answer": f"{row['body']} / {row['query_text']}", "finish_reason": "eos"}


class WrittenRun(runs.Run):
    """A run that has the parts and steps that the test gives, instead of those in its folder."""

    parts: list[ArtifactRef]
    steps: list[ArtifactRef]

    def list_parts(self) -> list[ArtifactRef]:
        return self.parts

    def list_steps(self) -> list[ArtifactRef]:
        return self.steps


@dataclass
class Run:
    """The artifacts of a run, which can be written several times."""

    database: Path
    workload: Workload
    record: RunRecord
    read: ReadResult
    tokens: ArtifactRef
    parts: list[ArtifactRef]
    steps: list[ArtifactRef]

    def write(self, **options: Any) -> RunSummary:
        run = WrittenRun(self.database, str(Path(self.read.requests.path).parent), self.record)
        run.artifacts = {"requests": self.read.requests, "tokens": self.tokens}
        run.parts, run.steps = self.parts, self.steps
        return write_run(run, self.workload, **options)

    def rows(self) -> list[Row]:
        with open_parquet(self.read.requests) as file:
            rows: list[Row] = file.read().to_pylist()
        return rows


@dataclass
class Night:
    """A database file with every table of `sql/schema.sql`."""

    path: Path
    results: list[RunSummary] = field(default_factory=list)

    def sql(self, query: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        with duckdb.connect(str(self.path)) as connection:
            return connection.execute(query, parameters).fetchall()

    def prepare(
        self,
        workload: Workload | str = "snippets",
        answer: Answer = echo,
        *,
        model_digest: str = "model-1",
        full: bool = False,
        attach: dict[str, str] | None = None,
        too_long: Callable[[Row], bool] = lambda row: False,
        num_parts: int = 2,
        **record: Any,
    ) -> Run:
        """Read, and make the artifacts that the other stages would; `answer` gives None for a row left undone."""
        chosen = load_workload(workload) if isinstance(workload, str) else workload
        run = RunRecord(
            run_id=new_run_id(chosen.name),
            workload=chosen.name,
            workload_source=chosen.source,
            workload_digest=chosen.digest,
            model="tiny",
            model_digest=model_digest,
            started_at=datetime.now(UTC).isoformat(),
            **({"status": "completed", "config": {"attach": attach or {}}} | record),
        )
        folder = Path(runs.Run.create(self.path, run).folder)
        found = read.fn(make_source(self.path, model_digest, full=full, attach=attach or {}), chosen, folder)
        with open_parquet(found.requests) as file:
            rows = file.read().to_pylist()
        errors = {row["row_id"]: row["error"] or ("prompt too long" if too_long(row) else None) for row in rows}
        tokens = [
            {"row_id": row_id, "token_ids": [], "error": error, "priority": 0} for row_id, error in errors.items()
        ]
        counts = {"num_prompt_tokens": 10, "num_cached_tokens": 4, "num_output_tokens": 2, "token_ids": [1, 2]}
        counts |= {"compute_ms": 2.5, "prefix_group": 0}
        answers = []
        for row in rows:
            given = answer(row) if errors[row["row_id"]] is None else None
            if given is not None:
                answers.append({"row_id": row["row_id"], **counts, **given})
        step = {field.name: 1 for field in STEPS_SCHEMA} | {"worker": "host-1", "started_at": datetime.now(UTC)}
        return Run(
            database=self.path,
            workload=chosen,
            record=run,
            read=found,
            tokens=write_rows(folder / "tokens.parquet", TOKENS_SCHEMA, tokens),
            parts=[
                write_rows(
                    folder / "parts" / f"part-{number:05}.parquet", part_schema(chosen.kind), answers[number::num_parts]
                )
                for number in range(num_parts)
            ],
            steps=[write_rows(folder / "steps" / "part-00000.parquet", STEPS_SCHEMA, [step, step | {"step": 2}])],
        )

    def run(self, *arguments: Any, **options: Any) -> Run:
        """A whole night."""
        run = self.prepare(*arguments, **options)
        self.results.append(run.write())
        return run


@pytest.fixture(scope="session")
def new_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `night` begins with, made once; to be copied."""
    path = tmp_path_factory.mktemp("night") / "night.duckdb"
    with connect(path, create=True) as connection:
        create_schema(connection)
        connection.execute("insert into documents values ('d1', 'One', 'body 1'), ('d2', null, 'body 2')")
        connection.execute("insert into queries values ('q1', 'query 1'), ('q2', 'query 2')")
        connection.execute("insert into snippet_requests values ('d2', 'q1'), ('d1', 'q2'), ('d1', 'q1')")
    return path


@pytest.fixture
def tidy_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in which no temporary file may be left behind."""
    yield tmp_path
    assert not list(tmp_path.rglob("*.tmp")), "a temporary file was left behind"


@pytest.fixture
def night(new_database: Path, tidy_path: Path) -> Night:
    """Two documents, two queries, three pairs; nothing answered."""
    return Night(shutil.copyfile(new_database, tidy_path / "night.duckdb"))


@pytest.fixture
def make_run(night: Any) -> Callable[..., str]:
    """Makes a run of three rows and gives it steps; returns its id."""

    def make(steps: Sequence[Step] = (), config: Any = CONFIG, **same: int) -> str:
        run_id = night.run(config=config).record.run_id
        replace_steps(night, run_id, steps, **same)
        return str(run_id)

    return make
