"""The page of a run in a real browser: what is drawn, that nothing is loaded, that text stays text."""

import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.runtime import flow_run

from flows.command.run_flow import run_flow
from flows.report import report, report_run
from flows.settings import EngineSettings
from tasks.evaluation.evaluation import evaluate_answers
from tasks.report import link_report, write_report
from tasks.runs.run import Run
from tasks.storage.artifact import runs_folder, write_parquet
from tasks.storage.schemas import PLAN_SCHEMA
from tasks.workloads.workload import load_workload
from tests.flows.browser import Browser, Node, first_pixel

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OWNERS = ("prefix", "kv", "quiet")
ATTACK = "<script>document.title='broken'</script>"
ATTACKS = (
    ATTACK,
    "'\"><img src=x onerror=\"document.title='broken'\">",
    "</style></svg></title>" + ATTACK,
    "&lt;b&gt; \x07",
)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    for name in BROWSERS:
        if program := shutil.which(name):
            return Browser(program, tmp_path_factory.mktemp("browser"))
    pytest.fail(f"these tests need a browser, one of {', '.join(BROWSERS)}; on Debian: apt-get install chromium")


@pytest.fixture
def open_report(nights: Any, browser: Browser, tmp_path: Path) -> Callable[..., Node]:
    """Writes the page of a run and opens it; nothing may be written to the console."""

    def open_page(run_id: str | None = None, **options: Any) -> Node:
        page, _ = write_report(nights.path, run_id, tmp_path / "page.html", **options)
        root, console = browser.open(page)
        assert console == []
        return root

    return open_page


@pytest.fixture(scope="module")
def ranking_page(answered_before: Any, browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Node:
    """The page of a first night that ranks; nothing may be written to the console."""
    nights, _ = answered_before("ranking")
    page, _ = write_report(nights.path, page=tmp_path_factory.mktemp("ranking") / "page.html")
    root, console = browser.open(page)
    assert console == []
    return root


@pytest.mark.usefixtures("prefect_server")
def test_the_page_shows_what_the_tables_say(nights: Any, add_bad_rows: Any, open_report: Callable[..., Node]) -> None:
    add_bad_rows(nights)
    nights.run(
        "snippets",
        partition_tokens=700,
        engine=EngineSettings(dtype="float32", kv_memory="8MiB", max_num_batched_tokens=64),
    )
    page = open_report()
    (run,) = nights.sql(
        "select run_id, num_ok, num_errors, num_rows, num_cached_tokens / num_prompt_tokens, best_token_saving_ratio"
        " from runs"
    )
    run_id, num_ok, num_errors, num_rows, saved, best = run
    tiles = {node.all("dt")[0].text: node.all("dd")[0].text for node in page.all("dl", "tiles")[0].children}
    assert tiles["rows answered"] == f"{num_ok}of {num_rows}; 0 done before"
    assert tiles["rows failed"].startswith(f"{num_errors}0 left")
    assert tiles["prompt tokens saved"] == f"{saved:.1%}at best {best:.1%}"
    assert run_id in page.all("dl", "facts")[0].text

    steps = nights.sql(
        "select num_decode_tokens, num_suffix_tokens, num_prefix_tokens, num_kv_blocks_used, num_running_requests,"
        " num_prefix_kv_blocks, num_request_kv_blocks from steps order by partition, step"
    )
    assert 10 < len(steps) <= 240, "each step is a place of its own in the picture"
    tokens = page.by_id("tokens")
    pixels = {}
    for position, kind in enumerate(("decode", "suffix", "prefix")):
        heights = [float(bar.attributes["height"]) for bar in tokens.all("rect", kind)]
        counts = [step[position] for step in steps if step[position]]
        assert len(heights) == len(counts) > 0
        pixels |= {kind: [height / num_tokens for height, num_tokens in zip(heights, counts, strict=True)]}
    (scale,) = {round(size, 1) for sizes in pixels.values() for size in sizes}
    assert scale == pytest.approx((270 - 44 - 22) / (64 * 1.06), abs=0.05), "the chunk size reaches the top"
    assert [row[1:4] for row in tokens.cells()] == [[f"{number:,}" for number in step[:3]] for step in steps]
    assert len(tokens.all("rect", "target")) == len(steps)
    assert [row[4] for row in page.by_id("kv-memory").cells()] == [f"{step[3]:,}" for step in steps]
    assert [row[6:] for row in page.by_id("kv-memory").cells()] == [[f"{s[5]:,}", f"{s[6]:,}", "0"] for s in steps]
    assert max(step[5] for step in steps) > 0
    assert all(step[5] + step[6] == step[3] for step in steps), "prefixes and running requests hold all of it"
    assert [row[2] for row in page.by_id("requests").cells()] == [f"{step[4]:,}" for step in steps]

    degrees = page.by_id("share-degrees").cells()
    assert sum(int(row[3]) for row in degrees) == num_ok
    assert [row[0] for row in degrees] == ["3"], "three queries ask of each document"
    for name in ("prompt-lengths", "output-lengths", "computed-lengths"):
        assert sum(int(row[1]) for row in page.by_id(name).cells()) == num_ok
    groups = page.by_id("slowest-groups").cells()
    ((all_ms, step_ms, num_groups),) = nights.sql(
        "select sum(compute_ms), (select sum(duration_ms) from steps), count(distinct prefix_group) from snippets"
    )
    assert all_ms == pytest.approx(step_ms), "what answers cost adds up to the time of the steps"
    assert len(groups) == num_groups == 4
    assert sum(float(row[2].rstrip("%")) for row in groups) == pytest.approx(100, abs=0.3)
    assert {row[0].split(", ")[0] for row in groups} == {f"d{n}" for n in range(4)}
    assert {row[3] for row in groups} == {"3"}
    assert sum(int(row[5]) for row in groups) == num_ok
    example = (ROOT / "docs" / "report.md").read_text().split("```sql\n")[1].split("```")[0]
    assert sum(row[2] for row in nights.sql(example)) * 1000 == pytest.approx(step_ms)
    errors = {row[0]: int(row[3]) for row in page.by_id("errors").cells()}
    assert sum(errors.values()) == num_errors
    assert errors["body is NULL"] == 1
    num_partitions = len(nights.sql("select distinct partition from steps"))
    assert len(page.by_id("slowest-partitions").cells()) == num_partitions > 1
    assert "max_num_batched_tokens" in page.by_id("settings").text


def test_every_picture_has_a_name_and_a_table(ranking_page: Node) -> None:
    ids = [node.attributes["id"] for node in ranking_page.walk() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    assert "prediction" not in ids, "there is none"
    figures = ranking_page.all("figure")
    assert {figure.attributes["id"] for figure in figures} >= {
        "stages", "tokens", "kv-memory", "requests", "savings", "share-degrees", "utilisation", "slowest-steps",
    }  # fmt: skip
    for figure in figures:
        assert figure.cells(), figure.attributes["id"]
        assert figure.all("caption")[0].text
        assert "-- purpose:" in figure.all("pre")[0].text
        for picture in figure.all("svg"):
            assert picture.attributes["role"] == "img"
            assert ranking_page.by_id(picture.attributes["aria-labelledby"]).text
            assert ranking_page.by_id(picture.attributes["aria-describedby"]).text
    (style,) = ranking_page.all("style")
    for kind in {kind for rect in ranking_page.all("rect") for kind in rect.classes}:
        assert re.search(rf"\.{kind} {{[^}}]*fill:", style.text), f"rectangles of class {kind} would be black"
    assert ranking_page.all("html")[0].attributes["lang"] == "en"


def test_the_page_needs_nothing_else_and_may_load_nothing(ranking_page: Node) -> None:
    for node in ranking_page.walk():
        assert not {"src", "href", "xlink:href", "action", "background", "srcset"} & set(node.attributes), node.tag
        assert not [name for name in node.attributes if name.startswith("on")], node.tag
    assert not re.search(
        r"url\(|@import|https?:", "".join(node.text for node in ranking_page.all("style") + ranking_page.all("script"))
    )
    (policy,) = (
        node for node in ranking_page.all("meta") if node.attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.attributes["content"].startswith("default-src 'none'; script-src 'sha256-")


@pytest.mark.usefixtures("prefect_server")
def test_text_of_the_database_is_inert(nights: Any, open_report: Callable[..., Node]) -> None:
    for number, attack in enumerate(ATTACKS):
        nights.sql("insert into documents values (?, ?, ?)", [f"{number}{attack}", attack, f"{attack} {attack}"])
        nights.sql("insert into snippet_requests values (?, 'q0'), (?, 'q1')", [f"{number}{attack}", f"gone {attack}"])
    nights.run("snippets")
    all_attacks = " | ".join(ATTACKS)
    nights.sql("update runs set workload = $1, model = $1, status = 'failed', error = $1, run_id = $1", [all_attacks])
    nights.sql("update snippets set run_id = $1, error = error || chr(10) || $1 where error is not null", [all_attacks])
    nights.sql("update steps set run_id = $1", [all_attacks])
    nights.sql(
        "update runs set config = json_object($1, json_object($1, $1)), versions = json_object($1, $1)", [all_attacks]
    )
    page = open_report()
    assert page.all("title")[0].text.startswith(ATTACK), "the title is the workload's name, no script has changed it"
    assert len(page.all("script")) == 1
    assert not [node.tag for node in page.walk() if node.tag in ("img", "b")]
    shown = all_attacks.replace("\x07", "\N{REPLACEMENT CHARACTER}")
    assert page.all("h1")[0].text == f"{shown} failed"
    facts = [node.text for node in page.all("dd")]
    assert facts[:2] == [shown, shown]
    assert any(shown in row[2] for row in page.by_id("errors").cells())
    assert [shown] * 2 in [[row[0].removeprefix("version of "), row[1]] for row in page.by_id("settings").cells()]


def test_the_browser_would_tell(browser: Browser, tmp_path: Path) -> None:
    """What the other tests rely on: errors of scripts, and what a policy forbids, are seen."""
    page = tmp_path / "bad.html"
    page.write_text("<!doctype html><title>x</title><script>nothing.at.all</script>")
    assert "nothing is not defined" in browser.open(page)[1][0]
    policy = "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'\">"
    page.write_text(f"<!doctype html>{policy}<title>x</title>{ATTACK}<img src=http://127.0.0.1:9/x>")
    root, console = browser.open(page)
    assert len(console) == 2
    assert root.all("title")[0].text == "x"


@pytest.mark.usefixtures("prefect_server")
def test_the_pointer_brings_numbers(nights: Any, answered: Any, browser: Browser, tmp_path: Path) -> None:
    answered("ranking")
    page, _ = write_report(nights.path, page=tmp_path / "page.html")
    move = (
        "<script>document.querySelector('#tokens .target')"
        ".dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: 9, clientY: 9}))</script>"
    )
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text()).replace("</body>", f"{move}</body>")
    page.write_text(text)
    root, console = browser.open(page)
    tip = root.by_id("tip")
    ((suffix, prefix),) = nights.sql(
        "select num_suffix_tokens, num_prefix_tokens from steps where partition = 0 and step = 0"
    )
    assert console == []
    assert tip.text == f"step 0, 0 ms: decode 0, suffix {suffix}, prefix {prefix}"
    assert "hidden" not in tip.attributes


TEXT_COLOURS = """Array.from(document.body.querySelectorAll("*"), (node) => {
  const own = Array.from(node.childNodes).filter((child) => child.nodeType === 3).map((child) => child.data).join("");
  const style = getComputedStyle(node);
  let behind = node;
  while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
  return [own.trim(), node instanceof SVGElement ? style.fill : style.color, getComputedStyle(behind).backgroundColor];
}).filter(([text, colour, ground]) => text && !colour.startsWith("none"))"""
"""Of each element with text of its own: the text, its colour, and the colour of the nearest ground behind it."""


def contrast(*colours: str) -> float:
    """Of two colours as a browser writes them, "rgb(255, 255, 255)": 1 to 21, as WCAG defines it."""
    lights = []
    for colour in colours:
        assert colour.startswith("rgb("), colour
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)
    return max(lights) / min(lights)


@pytest.mark.usefixtures("prefect_server")
def test_it_is_readable_by_day_and_by_night(nights: Any, answered: Any, browser: Browser, tmp_path: Path) -> None:
    answered("ranking")
    page, _ = write_report(nights.path, page=tmp_path / "page.html")
    by_day, by_night = (f"--blink-settings=preferredColorScheme={scheme}" for scheme in (1, 0))
    assert first_pixel(browser.take_picture(page, by_day)) == (245, 246, 249)
    assert first_pixel(browser.take_picture(page, by_night)) == (17, 20, 27)
    for light in (by_day, by_night):
        texts = browser.evaluate(page, 1200, TEXT_COLOURS, light)
        assert len(texts) > 100
        faint = [text for text, colour, ground in texts if contrast(colour, ground) < 4.5]
        assert faint == [], "text needs a contrast of 4.5 to what is behind it"


@pytest.mark.usefixtures("prefect_server")
def test_a_long_run_keeps_its_valley_and_its_preemption(
    nights: Any, answered: Any, open_report: Callable[..., Node]
) -> None:
    (summary,) = answered("snippets")
    nights.sql("delete from steps")
    nights.sql(
        "insert into steps select $1, 0, i, if(i = 30_000, 1, 120), 0, 0, 45, 30, 15, 5, 100, 9,"
        " if(i < 49_000, 5, 0), 1, if(i = 40_000, 1, 0), 2.0, 0, if(i >= 40_000 and i < 41_000, 12, 0),"
        " 0, 0, null, null"
        " from range(50_000) as steps (i)",
        [summary.run_id],
    )
    page = open_report()
    tokens = page.by_id("tokens")
    assert len(tokens.all("rect", "decode")) == 240
    assert len(tokens.all("path", "flag")) == 1
    assert len(tokens.all("rect", "shade")) == 1
    (line,) = (path for path in tokens.all("path", "line") if "ink" in path.classes)
    levels = [float(level) for level in re.findall(r" ([\d.]+)H", line.attributes["d"])]
    assert len(levels) == 240
    assert sorted(set(levels)) == [pytest.approx(226 - 204 * share / 1.06, abs=0.02) for share in (120 / 128, 1 / 128)]
    assert levels.index(max(levels)) == 30_000 * 240 // 50_000
    memory = page.by_id("kv-memory")
    pixels = {kind: {round(float(bar.attributes["height"]), 1) for bar in memory.all("rect", kind)} for kind in OWNERS}
    assert pixels == {kind: {round(204 / 106 * blocks, 1)} for kind, blocks in zip(OWNERS, (30, 15, 5), strict=True)}
    assert [key.text for key in memory.all("li")][2].startswith("cached: ")
    (swapped,) = (path for path in memory.all("path", "line") if "swapped" in path.classes)
    heights = [226 - float(level) for level in re.findall(r" ([\d.]+)H", swapped.attributes["d"])]
    assert max(heights) == pytest.approx(204 / 106 * 12, abs=0.02)
    assert [height > 0.1 for height in heights].count(True) == pytest.approx(1000 * 240 / 50_000, abs=1)
    assert {row[-1] for row in memory.cells()} == {"0", "12"}
    size = len((nights.path.parent / "page.html").read_bytes())
    assert size < 1_000_000, "however many steps"


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("preemption", ["recompute", "swap", "kill"])
def test_only_what_was_computed_twice_is_said_to_be(
    nights: Any, open_report: Callable[..., Node], preemption: str
) -> None:
    engine = EngineSettings(dtype="float32", kv_memory="160KiB", output_reserve=0.0, preemption=preemption)
    nights.run("snippets", engine=engine)
    ((num_preempted, num_computed, num_needed),) = nights.sql(
        "select sum(num_preempted_requests), sum(num_suffix_tokens + num_prefix_tokens),"
        " any_value(num_prompt_tokens - num_cached_tokens) from runs join steps using (run_id)"
    )
    page = open_report().text
    assert f"{num_preempted} times a request lost its KV memory before it was answered." in page
    assert ("with what was computed twice" in page) == (num_computed > num_needed) == (preemption == "recompute")


@pytest.mark.usefixtures("prefect_server")
def test_engines_side_by_side_and_padding_are_shown_as_such(nights: Any, open_report: Callable[..., Node]) -> None:
    nights.run("snippets", partition_tokens=700)
    page = open_report()
    assert not [node for node in page.walk() if node.attributes.get("id") == "engines"]
    assert not page.all("rect", "padding")
    nights.sql("update steps set worker = if(partition % 2 = 0, 'a', 'b'), num_padding_tokens = 10")
    page = open_report()
    expected = nights.sql(
        "select worker, count(distinct partition), count(*), max(num_kv_blocks_used), sum(duration_ms) from steps"
        " group by worker order by min(started_at)"
    )
    cells = page.by_id("engines").cells()
    assert [(row[1], int(row[2]), int(row[3]), int(row[9])) for row in cells] == [row[:4] for row in expected]
    longest = max(row[4] for row in expected)
    assert [float(row[6].rstrip("%")) for row in cells] == pytest.approx(
        [100 * r[4] / longest for r in expected], abs=0.1
    )
    tokens = page.by_id("tokens")
    order = nights.sql(
        "select num_decode_tokens, num_suffix_tokens, num_prefix_tokens from steps join"
        " (select worker, min(started_at) as begun from steps group by worker) using (worker)"
        " order by begun, partition, step"
    )
    assert [[int(cell.replace(",", "")) for cell in row[1:5]] for row in tokens.cells()] == [
        [*row, 10] for row in order
    ]
    assert {row[-1] for row in tokens.cells()} == {"0", "1"}
    assert len(tokens.all("rect", "padding")) == len(order)
    for name in ("tokens", "kv-memory", "requests"):
        assert [text.text for text in page.by_id(name).all("text") if text.text.startswith("engine ")] == [
            "engine 0", "engine 1",
        ]  # fmt: skip
    assert "on the longest of 2 engines" in page.all("dl", "tiles")[0].text
    assert [key.text for key in tokens.all("li")][3] == "padding: computed and thrown away"


@pytest.mark.usefixtures("prefect_server")
def test_no_two_labels_of_a_picture_overlap(nights: Any, answered: Any, browser: Browser, tmp_path: Path) -> None:
    """A large plan, eight engines, steps above the chunk size, preemption and a full KV cache, in two windows."""
    (summary,) = answered("snippets")
    nights.sql("delete from steps")
    nights.sql(
        "insert into steps by name select $1 as run_id, i // 125 as partition, i as step, 60 as num_decode_tokens,"
        " 20 as num_suffix_tokens, 10 as num_prefix_tokens, 45 as num_padding_tokens,"
        " 99_000 as num_kv_blocks_used, 100_000 as num_kv_blocks_total, 900 as num_running_requests,"
        " 5 as num_waiting_requests, 1 as num_finished_requests, i % 50 as num_preempted_requests,"
        " 2000.0 as duration_ms, 'engine ' || i // 125 as worker from range(1000) as steps (i)",
        [summary.run_id],
    )
    for degrees in ((1, 2, 3, 8, 16, 32), (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)):
        rows = [
            {"row_id": 0, "group_id": group, "member_id": member, "num_prefix_tokens": 1000 * group}
            | {"num_common_tokens": 0, "partition": 0, "priority": 0, "token_ids": [1]}
            for group, degree in enumerate(degrees, start=1)
            for member in range(degree)
        ]
        plan = write_parquet(tmp_path / "plan.parquet", PLAN_SCHEMA, [pa.RecordBatch.from_pylist(rows, PLAN_SCHEMA)])
        Run.load(nights.path, runs_folder(nights.path) / summary.run_id).note({"plan": plan})
        page, _ = write_report(nights.path, page=tmp_path / "page.html")
        for width in (1200, 500):
            pictures = browser.label_boxes(page, width)
            assert len(pictures) >= 9
            texts = {text for labels in pictures for text, *_ in labels}
            assert len(degrees) > 6 or texts >= {"3", "8", "9 to 16", "17 to 32"}, "where there is room, all are named"
            for labels in pictures:
                for (text, left, top, right, bottom), other in combinations(labels, 2):
                    is_apart = right <= other[1] or other[3] <= left or bottom <= other[2] or other[4] <= top
                    assert is_apart, f"{text!r} covers {other[0]!r} in a window of {width} pixels"


@pytest.mark.usefixtures("prefect_server")
def test_long_names_make_no_page_wider_than_its_window(
    nights: Any, answered: Any, browser: Browser, tmp_path: Path
) -> None:
    """Here a gold table's in the note of a picture; wide tables and pictures move within their figures."""
    answered("ranking")
    gold = "gold" * 30
    nights.sql(f"create table {gold} as select query_id, doc_id, label from latest_rankings")
    evaluate_answers.fn(nights.path, load_workload("ranking"), gold)
    page, _ = write_report(nights.path, page=tmp_path / "page.html")
    assert f"gold table {gold}" in page.read_text()
    for width in (500, 1200):
        fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert browser.evaluate(page, width, fits) is True


@pytest.mark.usefixtures("prefect_server")
def test_a_night_without_work_has_a_page_that_says_so(
    nights: Any, answered: Any, open_report: Callable[..., Node]
) -> None:
    answered("ranking")
    (summary,) = nights.run("ranking")
    page = open_report(summary.run_id)
    assert "nothing new to do: 6 rows had been done before" in page.all("main")[0].text
    assert [figure.attributes["id"] for figure in page.all("figure")] == ["stages", "settings"]


@pytest.mark.usefixtures("prefect_server")
def test_a_prediction_is_compared_where_there_is_one(
    nights: Any, answered: Any, open_report: Callable[..., Node]
) -> None:
    (summary,) = answered("ranking")
    ((num_steps, config),) = nights.sql("select num_steps, config from runs")
    config = config[:-1] + f', "prediction": {{"num_steps": {num_steps * 2}, "step_seconds": 0.5, "unheard_of": 1}}}}'
    nights.sql("update runs set config = ?::json", [config])
    cells = open_report(summary.run_id).by_id("prediction").cells()
    assert cells[0] == ["steps", str(num_steps * 2), str(num_steps), "0.50"]
    assert [row[0] for row in cells] == ["steps", "time of all steps"]


@pytest.mark.usefixtures("prefect_server")
def test_the_flow_run_links_the_page_and_holds_the_numbers(nights: Any, answered: Any) -> None:
    (summary,) = answered("ranking")
    nights.sql("update runs set error = '<b>no</b> [link](http://x)'")

    @flow(name="with-report", persist_result=False)
    def with_report() -> tuple[str, str]:
        return link_report(str(nights.path), summary.run_id), flow_run.id

    path, flow_run_id = with_report()
    assert Path(path) == runs_folder(nights.path) / summary.run_id / "report.html"
    with get_client(sync_client=True) as client:
        wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        artifacts = {artifact.key: artifact.data for artifact in client.read_artifacts(artifact_filter=wanted)}
    assert set(artifacts) == {"report-ranking", "numbers-ranking"}
    assert f"[Report of {summary.run_id}]({Path(path).as_uri()})" == artifacts["report-ranking"]
    assert "| rows answered | 6 | of 6; 0 done before |" in artifacts["numbers-ranking"]
    assert r"\<b\>no\</b\> \[link\]\(http://x\)" in artifacts["numbers-ranking"]
    assert "Share degree" in Path(path).read_text()


@pytest.mark.usefixtures("prefect_server")
def test_a_report_that_fails_ends_no_night(nights: Any, answered: Any) -> None:
    answered("ranking")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]

    @flow(name="night-with-a-lost-run", persist_result=False)
    def night() -> str:
        report_run(nights.path, "nonsense")
        return "went on"

    logger = logging.getLogger("batchloom")
    logger.addHandler(handler)
    try:
        assert night() == "went on"
    finally:
        logger.removeHandler(handler)
    (record,) = (record for record in records if record.levelno == logging.WARNING)
    assert record.getMessage().startswith("run nonsense has no report: ")
    assert "no run 'nonsense' in table runs" in record.getMessage()


@pytest.mark.usefixtures("prefect_server")
def test_the_command_line(nights: Any, tmp_path: Path) -> None:
    summaries = nights.run()

    def run(*options: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "flows.report", "--database", str(nights.path), *options]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    result = run()
    page = runs_folder(nights.path) / summaries[-1].run_id / "report.html"
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{page}\n", "")
    assert page.stat().st_mode & 0o777 == 0o600
    Run.load(nights.path, page.parent)
    result = run("--run", summaries[0].run_id, "--out", str(tmp_path / "out.html"))
    assert (result.returncode, result.stdout) == (0, f"{tmp_path}/out.html\n")
    assert summaries[0].run_id in (tmp_path / "out.html").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--database", "{tmp}/none.duckdb"), "no database at {tmp}/none.duckdb: no such file"),
        (("--run", "nonsense"), "no run 'nonsense' in table runs"),
        ((), "no run in table runs yet"),
    ],
)
def test_a_mistake_is_one_line(
    nights: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    given = [option.format(tmp=tmp_path) for option in options]
    assert run_flow(report, ["--database", str(nights.path), *given]) == 1
    assert capsys.readouterr() == ("", f"report: {message.format(tmp=tmp_path)}\n")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("prefect_server")
def test_a_page_that_cannot_be_written_is_one_line(
    nights: Any, answered: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answered("ranking")
    capsys.readouterr()
    assert run_flow(report, ["--database", str(nights.path), "--out", f"{tmp_path}/no/such/page.html"]) == 1
    assert (
        capsys.readouterr().err
        == f"report: {tmp_path}/no/such/page.html cannot be written: No such file or directory\n"
    )
    for place in (".", "/", str(tmp_path)):
        assert run_flow(report, ["--database", str(nights.path), "--out", place]) == 1
        assert capsys.readouterr().err == f"report: {place} cannot be written: Is a directory\n"
    (folder,) = runs_folder(nights.path).glob("*-ranking-*")
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    assert run_flow(report, ["--database", str(nights.path)]) == 1
    message = f"{folder}/report.html cannot be written: Is a directory; name another file with --out"
    assert capsys.readouterr().err == f"report: {message}\n"


@pytest.mark.usefixtures("prefect_server")
def test_the_nightly_flow_leaves_a_page_for_each_workload_with_work(nights: Any) -> None:
    for summary in nights.run():
        page = runs_folder(nights.path) / summary.run_id / "report.html"
        assert "Share degree" in page.read_text()
        page.unlink()
        write_report(nights.path, summary.run_id)
        assert "Share degree" in page.read_text(), "the plan is found again, as long as the cache has it"
    for summary in nights.run():
        assert not (runs_folder(nights.path) / summary.run_id / "report.html").exists()
