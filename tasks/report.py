"""Writes the report of a run: one HTML page in its folder, and its main numbers in Prefect."""

import re
from contextlib import suppress
from pathlib import Path

from prefect import task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from engine.errors import ArtifactError
from tasks.database.connection import connect
from tasks.report_page.facts import RunFacts, read_run, read_run_facts
from tasks.report_page.findings import find_remarkable, key_figures
from tasks.report_page.page import render_report
from tasks.runs.run import Run
from tasks.runs.run_summary import artifact_key
from tasks.storage.artifact import replace_file, runs_folder, writing


def write_report(
    database: str | Path, run_id: str | None = None, page: Path | None = None, *, lock_timeout_seconds: float = 30.0
) -> tuple[Path, RunFacts]:
    """Write the page of a run, completely or not at all, readable by its owner alone; returns its absolute path, and
    what it shows. The database is only read. Without the plan that the run's manifest names there are no share degrees.
    Raises `DatabaseError` if there is no such database, table or run, `ArtifactError` if the page cannot be written.

    Args:
        run_id: None for the newest run that had something to do.
        page: the file; None for ``report.html`` in the run's folder.
        lock_timeout_seconds: to wait while another process has the database open.
    """
    with connect(database, read_only=True, lock_timeout_seconds=lock_timeout_seconds) as connection:
        run, plan = read_run(connection, run_id), None
        folder = runs_folder(database) / run.run_id
        with suppress(ArtifactError):
            plan = Run.load(database, folder).artifacts.get("plan")
        facts = read_run_facts(connection, run, plan)
    path = page or folder / "report.html"
    if path.is_dir():  # also "." and "/", which have no name
        raise ArtifactError(f"{path} cannot be written: Is a directory")
    if page is None:
        with writing(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replace_file(path) as file:
        file.write(render_report(facts).encode())
    return path.absolute(), facts


@task(name="report", retries=0, cache_policy=NO_CACHE, persist_result=False)
def link_report(database: str, run_id: str, lock_timeout_seconds: float = 30.0) -> str:
    """Write the page of a run into its folder and link it, with the main numbers, from the flow run; returns its path.
    See `write_report`."""
    path, facts = write_report(database, run_id, lock_timeout_seconds=lock_timeout_seconds)
    workload = facts.run.workload
    create_link_artifact(
        link=path.as_uri(),
        link_text=f"Report of {run_id}",
        key=artifact_key("report", workload),
        description=f"The page {path}",
    )
    create_markdown_artifact(
        markdown=summarise(facts), key=artifact_key("numbers", workload), description=f"Main numbers of {run_id}"
    )
    return str(path)


def summarise(facts: RunFacts) -> str:
    """The main numbers as a Markdown table, followed by the findings."""
    rows = [f"| {name} | {value} | {against} |" for name, value, against in key_figures(facts)]
    findings = [f"- {_plain(finding)}" for finding in find_remarkable(facts)]
    heading = f"## {_plain(facts.run.workload)}: {facts.run.status}"
    return "\n".join([heading, "", "| | | |", "|---|--:|---|", *rows, "", *findings])


def _plain(text: str) -> str:
    """Text of the database escaped for Markdown, so that nothing in it is markup, a link or a line of its own."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~&-])", r"\\\1", " ".join(text.split()))
