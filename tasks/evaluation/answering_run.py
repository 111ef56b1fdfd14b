"""A workload as it was when its newest answers were made."""

from pathlib import Path

from tasks.database.connection import connect, execute
from tasks.database.schema import list_relations
from tasks.workloads.model_use import bind_again
from tasks.workloads.workload import Workload


def bind_to_answers(database: str | Path, workload: Workload, run_id: str | None = None) -> Workload:
    """The workload with the adapter of its newest answer, and with the settings that the model of this answer decides,
    such as the labels of a classification head. Without an answer it stays as it is.

    Args:
        run_id: of the answer; None for any run.
    Raises:
        ModelError: the adapter or a model that decides settings is gone, or the model has changed.
    """
    table = workload.output.table
    with connect(database, read_only=True) as connection:
        if not {table.lower(), "runs"} <= list_relations(connection).keys():
            return workload
        found = execute(connection, "gold/newest_run", {"run_id": run_id}, table=table).fetchall()
    for model, model_digest, adapter in found:
        workload = bind_again(workload.with_adapter(adapter and Path(adapter)), model, model_digest)
    return workload
