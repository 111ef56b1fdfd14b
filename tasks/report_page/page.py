"""The page of a run: one HTML file that needs nothing else, no network, no other file."""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files

from tasks.report_page.facts import RunFacts
from tasks.report_page.figure import Figure
from tasks.report_page.findings import find_remarkable, key_figures
from tasks.report_page.markup import Content, Markup, element, join
from tasks.report_page.outcome_figures import draw_errors, draw_prediction
from tasks.report_page.quantity import seconds
from tasks.report_page.sharing_figures import draw_lengths, draw_savings, draw_share_degrees
from tasks.report_page.table import Table
from tasks.report_page.time_figures import draw_slowest, draw_stages, draw_utilisation
from tasks.report_page.timeline_figures import draw_timeline

FORBIDDEN = "base-uri 'none'; form-action 'none'"


def render_report(facts: RunFacts) -> str:
    """The page of a run as HTML; pure. Text from the database is inert, and the page may load and send nothing."""
    style, script = (Markup(files(__package__).joinpath(name).read_text("utf-8")) for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; {FORBIDDEN}"
    title = f"{facts.run.workload} · {facts.run.started_at_utc} UTC · batchloom"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", style),
    )
    body = element(
        "body",
        _render_header(facts),
        element("main", *(section for section in _render_sections(facts))),
        element("div", id="tip", role="status", hidden=""),
        element("script", script),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en').text}\n"


def _render_header(facts: RunFacts) -> Markup:
    run = facts.run
    facts_of_run = [
        ("run", run.run_id),
        ("model", run.model),
        ("started", f"{run.started_at_utc} UTC"),
        ("took", seconds(run.total_seconds)),
    ]
    tiles = [
        element("div", element("dt", name), element("dd", value, element("small", against)))
        for name, value, against in key_figures(facts)
    ]
    return element(
        "header",
        element("p", "batchloom run", class_="kicker"),
        element("h1", run.workload, " ", element("span", run.status, class_=f"status {run.status}")),
        element(
            "dl", *(join((element("dt", name), element("dd", value))) for name, value in facts_of_run), class_="facts"
        ),
        element("dl", *tiles, class_="tiles"),
    )


def _render_sections(facts: RunFacts) -> list[Markup]:
    has_steps, has_tokens = bool(facts.bins), facts.run.num_prompt_tokens > 0
    prediction = draw_prediction(facts)
    time = [draw_stages(facts), *(draw_timeline(facts) if has_steps else ())]
    sharing = [draw_savings(facts), draw_share_degrees(facts), *draw_lengths(facts)] if has_tokens else []
    sections = [
        _render_findings(find_remarkable(facts)),
        _section("Errors", [draw_errors(facts)] if facts.errors else []),
        _section("Time", time),
        _section("Sharing and lengths", sharing),
        _section("Steps", [draw_utilisation(facts), *draw_slowest(facts)] if has_steps else []),
        _section("Prediction", [prediction] if prediction else []),
        _render_settings(facts),
    ]
    return [section for section in sections if section.text]


def _section(title: str, figures: Sequence[Figure]) -> Markup:
    if not figures:
        return join(())
    return element(
        "section", element("h2", title), element("div", *(figure.render() for figure in figures), class_="figures")
    )


def _render_findings(findings: Sequence[str]) -> Markup:
    if not findings:
        return join(())
    items: list[Content] = [element("li", finding) for finding in findings]
    return element("section", element("h2", "What stands out"), element("ul", *items, class_="findings"))


def _render_settings(facts: RunFacts) -> Markup:
    """Settings and versions, and the statement that the others read from."""
    settings = []
    for name, value in facts.config.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        settings += [(f"{name}.{part}" if part else name, json.dumps(found)) for part, found in parts]
    rows = [*settings, *((f"version of {name}", found) for name, found in facts.versions.items())]
    table = Table(caption="Settings and versions", columns=("name", "value"), rows=rows, num_text_columns=2)
    return _section(
        "Settings",
        [
            Figure(
                slug="settings",
                title="Settings and versions",
                note="As the run noted them. The SQL below makes report_timeline, which the statements above read.",
                table=table,
                statement="report/timeline",
            )
        ],
    )
