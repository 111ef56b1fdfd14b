"""A real Prefect server for the session, and a database file with documents and requests."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import pytest
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_DATABASE_CONNECTION_URL,
    PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED,
    PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE,
    temporary_settings,
)

from flows.command.prefect_server import reachable_server
from flows.nightly import nightly
from flows.settings import EngineSettings, PlanSettings
from tasks.database.connection import connect
from tasks.database.schema import create_schema
from tasks.runs.run_summary import RunSummary
from tasks.storage.artifact import runs_folder

BODY = "The night watchman walks around house {} and writes down what he has seen. "
ENGINE = EngineSettings(dtype="float32", kv_memory="8MiB", max_num_batched_tokens=128)


@dataclass
class Nights:
    """A database and the nights over it."""

    path: Path
    model: Path

    @property
    def runs(self) -> Path:
        return runs_folder(self.path)

    def sql(self, query: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        with duckdb.connect(str(self.path)) as connection:
            return connection.execute(query, parameters).fetchall()

    def run(self, *workloads: str, partition_tokens: int = 1500, **parameters: Any) -> list[RunSummary]:
        """One night, with the real flow."""
        return nightly(
            database=self.path,
            model=str(self.model),
            workloads=workloads or ("snippets", "ranking"),
            engine=parameters.pop("engine", ENGINE),
            planning=PlanSettings(partition_tokens=partition_tokens),
            **parameters,
        )

    @property
    def inputs(self) -> list[str]:
        """Options of the command line."""
        return ["--database", str(self.path), "--model", str(self.model)]

    def add_towers(self, num_towers: int) -> None:
        """Add documents; every query asks about each."""
        with duckdb.connect(str(self.path)) as connection:
            connection.execute(
                "insert into documents select 'm' || i, 'Tower ' || i, repeat('A tower. ', 40) || i"
                " from range(?) as towers (i)",
                [num_towers],
            )
            connection.execute(
                "insert into snippet_requests select doc_id, query_id from documents, queries where doc_id like 'm%'"
            )

    def answers(self) -> dict[tuple[str, str], tuple[Any, ...]]:
        """What an analyst sees: (doc_id, query_id) to (status, snippet, error)."""
        rows = self.sql("select doc_id, query_id, status, snippet, error from latest_snippets")
        return {(doc_id, query_id): rest for doc_id, query_id, *rest in rows}


@pytest.fixture(scope="session")
def prefect_server(prefect_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the server that all flows of this process use; it writes states of task runs every five seconds, and
    no events.

    To write each state alone takes a fourth of the server's time.
    """
    database = tmp_path_factory.mktemp("prefect") / "prefect.db"
    shutil.copyfile(prefect_database, database)
    own: dict[Any, Any] = {PREFECT_SERVER_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{database}"}
    own[PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE] = 200
    own[PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED] = False
    with temporary_settings(own), reachable_server():
        yield str(PREFECT_API_URL.value())


@pytest.fixture(scope="session")
def new_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four documents, three queries about each, six candidates to rank; nothing is answered yet. To be copied."""
    path = tmp_path_factory.mktemp("new") / "team.duckdb"
    with connect(path, create=True) as connection:
        create_schema(connection)
    documents = [(f"d{i}", f"House {i}", BODY.format(i) * (2 + i)) for i in range(4)]
    queries = [(f"q{i}", f"what did he see in house {i}?") for i in range(3)]
    with duckdb.connect(str(path)) as connection:
        connection.executemany("insert into documents values (?, ?, ?)", documents)
        connection.executemany("insert into queries values (?, ?)", queries)
        connection.execute("insert into snippet_requests select doc_id, query_id from documents, queries")
        connection.execute("insert into ranking_candidates select query_id, doc_id from documents, queries limit 6")
    return path


@pytest.fixture
def nights(new_database: Path, tmp_path: Path, tiny_llama: Path) -> Nights:
    """Over a database of the test's own, in which nothing is answered yet: see `new_database`."""
    return Nights(Path(shutil.copyfile(new_database, tmp_path / "team.duckdb")), tiny_llama)


@pytest.fixture(scope="session")
def answered_before(
    new_database: Path, tiny_llama: Path, prefect_server: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Nights, list[RunSummary]]]:
    """Gives a database after one night of these workloads, and the night's summaries. To be copied."""

    @cache
    def answer(*workloads: str) -> tuple[Nights, list[RunSummary]]:
        database = shutil.copyfile(new_database, tmp_path_factory.mktemp("answered") / "team.duckdb")
        nights = Nights(Path(database), tiny_llama)
        return nights, nights.run(*workloads)

    return answer


@pytest.fixture
def answered(
    nights: Nights, answered_before: Callable[..., tuple[Nights, list[RunSummary]]]
) -> Callable[..., list[RunSummary]]:
    """As `nights.run`, for a first night that is not itself what is tested: a copy of one that was run before.

    Manifests name the plan of the original, which stays.
    """

    def copy(*workloads: str) -> list[RunSummary]:
        before, summaries = answered_before(*workloads)
        shutil.copyfile(before.path, nights.path)
        shutil.copytree(before.runs, nights.runs)
        return summaries

    return copy


@pytest.fixture
def add_bad_rows() -> Callable[[Nights], dict[tuple[str | None, str | None], str]]:
    return _add_bad_rows


def _add_bad_rows(nights: Nights) -> dict[tuple[str | None, str | None], str]:
    """Add requests that cannot be answered; gives a part of the error that each row must have."""
    with duckdb.connect(str(nights.path)) as connection:
        connection.execute("alter table documents alter body type blob using encode(body)")
        connection.execute("insert into documents values ('d-bytes', 'Bytes', ?)", [b"ab\xff\xfe"])
        connection.executemany(
            "insert into documents values (?, 'Bad', ?)",
            [("d-null", None), ("d-empty", b"  \n"), ("d-long", BODY.format("x").encode() * 100)],
        )
        connection.execute("insert into queries values ('q-empty', '')")
        reasons: dict[tuple[str | None, str | None], str] = {
            ("d-bytes", "q0"): "UTF-8",
            ("d-null", "q0"): "body is NULL",
            ("d-empty", "q0"): "body is empty",
            ("d-long", "q0"): "the limit is 976: 1024 of the model less 48 for the answer",
            ("d0", "q-empty"): "query_text is empty",
            ("d-gone", "q0"): "'d-gone' is not in documents",
            (None, "q0"): "doc_id",
        }
        connection.executemany("insert into snippet_requests values (?, ?)", list(reasons))
    return reasons
