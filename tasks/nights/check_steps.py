"""Checks each step's query before the night, against the database and the tables that earlier steps will make."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from secrets import token_hex

import duckdb

from engine.errors import BatchloomError, ConfigError, DatabaseError
from tasks.database.connection import connect, execute, quote_identifier, restrict_sql, set_option
from tasks.database.schema import INPUT_TABLES, check_requests, check_schema, create_schema, list_relations
from tasks.nights.graph import NightStep, chain_steps, plan_waves
from tasks.prompts.prompt import RequestForm
from tasks.prompts.text_codec import TextCodec
from tasks.workloads.workload import Workload

PLANNED = f"batchloom_planned_{token_hex(8)}"
"""Name of an in-memory database with the database's views, and the tables and views that the night will make. It is
random, because a user's database and attachments may have any name."""


def check_in_turn(
    database: Path, workloads: Sequence[Workload], attach: Mapping[str, str], lock_timeout_seconds: float = 30.0
) -> None:
    """Check workloads that are answered one after the other, each of which may read the answers of those before it;
    raises the first problem. See `check_tables`, and `find_query_problems` for the arguments."""
    check_tables(workloads)
    for problem in find_query_problems(database, *chain_steps(workloads), attach, lock_timeout_seconds):
        raise DatabaseError(problem)


def check_labels(workloads: Sequence[Workload], checkpoint: Path) -> None:
    """Raise `WorkloadError` if two labels of a workload are the same tokens of the checkpoint, or one has none."""
    for workload in workloads:
        if workload.kind.has_labels:
            RequestForm.of(workload, TextCodec.load(checkpoint), None)


def check_tables(workloads: Sequence[Workload]) -> None:
    """Raise `ConfigError` if two workloads write to the same table, or have the same name."""
    for first, second in combinations(workloads, 2):
        if first.output.table.lower() == second.output.table.lower():
            both = f"workloads {first.source} and {second.source} write to the table {second.output.table!r}"
            raise ConfigError(f"{both}: each workload needs a table of its own")
        if first.name.lower() == second.name.lower():
            both = f"workloads {first.source} and {second.source} are both called {second.name!r}"
            raise ConfigError(f"{both}: each workload needs a name of its own")


def find_query_problems(
    database: Path,
    steps: tuple[NightStep, ...],
    workloads: Mapping[str, Workload],
    attach: Mapping[str, str],
    lock_timeout_seconds: float = 30.0,
) -> list[str]:
    """Problems that keep the steps' queries from running, or their answers from being written; one line for each. A
    step after a step with a problem is not checked. The database is not changed.

    Args:
        steps, workloads: the graph, and step name to workload.
        attach: what queries may read beside the database.
        lock_timeout_seconds: to wait while another process has open for writing what they read.
    Raises:
        DatabaseError: the database cannot be opened, or an attachment cannot be attached.
    """
    problems: dict[str, str] = {}
    after = {step.name: step.after for step in steps}
    queries = [workload.requests_sql for workload in workloads.values()]
    with connect(database, read_only=True) as connection:
        execute(connection, "attach/folder", name=PLANNED)
        restrict_sql(connection, [], attach, queries, lock_timeout_seconds=lock_timeout_seconds)
        own, *others = execute(connection, "read/database_schemas").fetchall()
        # An unqualified name is not found in other schemas, unless a query names one of them.
        read = [own, *(other for other in others if other[1].lower() in " ".join(queries).lower())]
        planned = ",".join(_schema_name(*each) for each in ((PLANNED, "main"), *read))
        _copy_views(connection, planned)
        for name in (name for wave in plan_waves(steps) for name in wave.steps):
            if any(other in problems for other in after[name]):
                problems[name] = ""
                continue
            try:
                _check_step(connection, workloads[name], str(database), _schema_name(*own), planned)
            except (BatchloomError, duckdb.Error) as error:
                problems[name] = " ".join(str(error).split())
        set_option(connection, "search_path", _schema_name(*own))
        execute(connection, "attach/detach", name=PLANNED)
    return [problem for problem in problems.values() if problem]


def _copy_views(connection: duckdb.DuckDBPyConnection, planned: str) -> None:
    """Create the database's views in `PLANNED`, too, so that they read the tables that the night will make."""
    statements = execute(connection, "schema/view_statements").fetchall()
    set_option(connection, "search_path", planned)
    for (create,) in statements:
        with suppress(duckdb.Error):  # a view that cannot be read now, such as one over a dropped table
            connection.execute(create)


def _check_step(
    connection: duckdb.DuckDBPyConnection, workload: Workload, database: str, own: str, planned: str
) -> None:
    """Check a query and its output table, then create the step's tables in `PLANNED` for the checks of later steps.

    Args:
        database: its name in messages.
        own, planned: search paths of the database as it is, and as the night will leave it.
    """
    set_option(connection, "search_path", planned)
    check_requests(connection, workload, database)
    set_option(connection, "search_path", own)
    check_schema(connection, workload, database)
    existing = list_relations(connection)
    set_option(connection, "search_path", planned)
    check_schema(connection, workload, f"{database}, as the workloads before {workload.name!r} leave it")
    try:
        create_schema(connection, workload)
    except duckdb.BinderException as error:
        if "infinite recursion" not in str(error):
            raise
        table = workload.output.table
        raise DatabaseError(
            f"{database}: the query of workload {workload.name!r} reads the view {'latest_' + table!r} of its own"
            f" answers, itself or by another view: let it read the table {table!r}"
        ) from error
    for table, relation in list_relations(connection).items():
        if table in INPUT_TABLES & existing.keys() and not relation.is_view:
            execute(connection, "schema/drop_table", table=table)


def _schema_name(database: str, schema: str) -> str:
    return f"{quote_identifier(database)}.{quote_identifier(schema)}"
