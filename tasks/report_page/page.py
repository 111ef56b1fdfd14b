"""Renders the page of a run: one HTML file that needs no network and no other file."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from sql import statement
from tasks.report_page.facts import RunFacts
from tasks.report_page.findings import find_remarkable, key_figures
from tasks.report_page.pictures import draw_pictures, find_lengths, find_savings, find_stages, tenth
from tasks.report_page.quality import by_column, draw_quality, interval
from tasks.report_page.quantity import UNKNOWN, between, count, percent, seconds

# HTML allows no control characters, and UTF-8 no lone surrogates.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def render_report(facts: RunFacts) -> str:
    """The page of a run as HTML. Text from the database is escaped, and the page cannot load or send anything."""
    style, script = _read("page.css"), _read("page.js")
    functions = (between, by_column, count, interval, percent, seconds, statement, tenth)
    page = _template().render(
        {function.__name__: function for function in functions},
        style=Markup(style),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        facts=facts,
        tiles=key_figures(facts),
        findings=find_remarkable(facts),
        pictures=draw_pictures(facts) | draw_quality(facts),
        stages=find_stages(facts),
        savings=find_savings(facts),
        lengths=find_lengths(facts),
        predicted=list(_compare_prediction(facts)),
        settings=list(_list_settings(facts)),
    )
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", page) + "\n"


@cache
def _template() -> Template:
    """The template, compiled once for all workloads of a night."""
    return Environment(autoescape=True, undefined=StrictUndefined).from_string(_read("page.html.j2"))


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _compare_prediction(facts: RunFacts) -> Iterator[tuple[str, str, str, str]]:
    """(quantity, predicted, actual, ratio) of each quantity that was predicted and is known."""
    totals = facts.totals
    actual: dict[str, tuple[str, float | None, Callable[[float | None], str]]] = {
        "num_steps": ("steps", totals.num_steps, count),
        "num_computed_tokens": ("tokens computed", facts.run.num_computed_tokens, count),
        "peak_kv_blocks": ("most KV blocks", totals.peak_kv_blocks, count),
        "num_preempted_requests": ("preempted requests", totals.num_preempted_requests, count),
        "step_seconds": ("time of all steps", totals.step_seconds, seconds),
        "elapsed_seconds": ("time of the longest engine", totals.elapsed_seconds, seconds),
        "tecd_seconds": ("TECD", totals.tecd_seconds, seconds),
    }
    if facts.run.status == "deadline":
        num_done = facts.run.num_rows - facts.run.num_unanswered
        is_known = totals.span_seconds is not None and facts.run.infer_seconds is not None
        loading = facts.run.infer_seconds - totals.span_seconds if is_known else None
        actual = {
            "load_seconds": ("until the first step: loading the model", loading, seconds),
            "num_fitting_rows": ("rows done by the deadline", num_done, count),
            "half_time_rows": ("the same, as forecast at half-time", num_done, count),
            "num_begun_partitions": ("partitions begun by then", totals.num_partitions, count),
        }
    elif facts.run.num_unanswered:
        return  # the prediction is of the whole run
    elif totals.num_engines == 1:
        del actual["elapsed_seconds"]  # the same as all steps
    for name, (title, value, as_text) in actual.items():
        predicted = facts.prediction.get(name)
        if predicted is not None and value is not None:
            yield title, as_text(predicted), as_text(value), f"{value / predicted:.2f}" if predicted else UNKNOWN


def _list_settings(facts: RunFacts) -> Iterator[tuple[str, str]]:
    for name, value in facts.config.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{part}", json.dumps(found)) for part, found in value.items())
        else:
            yield name, json.dumps(value)
    for name, version in facts.versions.items():
        yield f"version of {name}", version
