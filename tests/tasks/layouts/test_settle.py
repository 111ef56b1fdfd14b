"""What a night chooses: never more tokens than as written or in one order, kept, and part of each row's content key."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.layouts.advice import advise_layouts
from tasks.layouts.choose import find_orders, spread_orders
from tasks.layouts.kept import use_kept
from tasks.layouts.parts import arrange_workload, split_prompt
from tasks.layouts.settle import settle_layouts
from tasks.layouts.side import Side, measure_sharing, read_in_layout
from tasks.runs.source import Source
from tasks.workloads.workload import Workload, load_workload

WORKLOAD = """
name = "w{number}"
mode = "score"
requests_sql = "rows.sql"
key = ["id"]
labels = ["yes", "no"]
[prompt]
chat = false
layout = "auto"
template = '''{template}'''
[output]
table = "w{number}"
"""

PARTS = ["Document: {a}", "Question: {b}\nof {a}", "Task: answer number NUMBER", "Customer: {c}"]

FOLDERS = count()


def make_source(folder: Path, rows: list[tuple[str, str, str]], model: Path) -> Source:
    """A database with a row of texts a, b and c for each of `rows`, numbered."""
    (folder / "rows.sql").write_text("select id, a, b, c from given")
    database = folder / "team.duckdb"
    with duckdb.connect(str(database)) as connection:
        connection.execute("create table given (id text, a text, b text, c text)")
        connection.executemany("insert into given values (?, ?, ?, ?)", [(str(i), *row) for i, row in enumerate(rows)])
    return Source(database=database, model=str(model), checkpoint=model, model_digest="m", max_model_len=1024)


def make_workload(folder: Path, number: int, parts: list[str]) -> Workload:
    text = "\n\n".join(parts).replace("NUMBER", str(number)) + "\nAnswer:"
    path = folder / f"w{number}.toml"
    path.write_text(WORKLOAD.format(number=number, template=text))
    return load_workload(path)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(*[st.sampled_from(["red house", "blue house by the sea", "x"])] * 3), min_size=1, max_size=8
    ),
    layouts=st.lists(st.permutations(PARTS).map(lambda parts: parts[:3]), min_size=1, max_size=2),
)
def test_a_chosen_layout_never_plans_more_tokens(
    tmp_path: Path, tiny_llama: Path, rows: list[tuple[str, str, str]], layouts: list[list[str]]
) -> None:
    folder = tmp_path / str(next(FOLDERS))
    folder.mkdir()
    source = make_source(folder, rows, tiny_llama)
    workloads = []
    for number, parts in enumerate(layouts):
        has_field = any("{" in part for part in parts)
        workloads.append(make_workload(folder, number, parts if has_field else [*parts, PARTS[0]]))
    settled = settle_layouts(source, workloads, is_kept=False)
    chosen = measure_sharing(source, settled, folder / "chosen").num_processed_tokens
    sides = [Side.read(source, workload, folder / f"side-{number}") for number, workload in enumerate(workloads)]
    texts = [side.read_texts() for side in sides]
    one = spread_orders(texts, find_orders(texts, [side.choices for side in sides]))
    written = [arrange_workload(each, ()) for each in workloads]
    assert chosen <= measure_sharing(source, written, folder / "written").num_processed_tokens
    laid_out = [side.lay_out(orders)[0] for side, orders in zip(sides, one, strict=True)]
    assert chosen <= measure_sharing(source, laid_out, folder / "one").num_processed_tokens


@pytest.mark.parametrize(("first", "is_said"), [("", False), ("Read, reader NUMBER: ", True)])
def test_advice_names_words_before_the_document_that_differ(
    tmp_path: Path, tiny_llama: Path, first: str, is_said: bool
) -> None:
    source = make_source(tmp_path, [("red house", "b", "c")], tiny_llama)
    advice = advise_layouts(source, [make_workload(tmp_path, number, [first + "{a} NUMBER?"]) for number in range(2)])
    assert any("begin with different" in sentence for sentence in advice.sentences) == is_said


LONG = "The night watchman walks around the house and looks at every door. " * 3
ROWS = [(LONG + "north", f"{number} {LONG[number:]}", "x") for number in range(6)]
ROWS += [(f"{number} {LONG[number:]}", LONG + "south", "x") for number in range(6)]
"""The first six share what a says, the others what b says."""


@pytest.fixture
def case(tmp_path: Path, tiny_llama: Path) -> tuple[Source, Workload]:
    source = make_source(tmp_path, ROWS, tiny_llama)
    return source, make_workload(tmp_path, 0, ["Document: {a}", "Question: {b}", "Customer: {c}"])


def read_requests(source: Source, workload: Workload, folder: Path) -> dict[int, dict[str, Any]]:
    rows = pq.read_table(read_in_layout(source, workload, folder).requests.path).to_pylist()
    return {int(row["id"]): row for row in rows}


def test_rows_have_orders_of_their_own_and_keep_them(case: tuple[Source, Workload], tmp_path: Path) -> None:
    source, workload = case
    before = measure_sharing(source, [arrange_workload(workload, ())], tmp_path / "written").num_processed_tokens
    (pending,) = settle_layouts(source, [workload], is_kept=False)
    assert use_kept(source.database, workload).row_layouts is None, "nothing is written"
    (chosen,) = settle_layouts(source, [workload])
    num_tokens = measure_sharing(source, [chosen], tmp_path / "chosen").num_processed_tokens
    assert num_tokens == measure_sharing(source, [pending], tmp_path / "pending").num_processed_tokens < 0.8 * before
    with duckdb.connect(str(source.database)) as connection:
        kept = connection.execute("select num_computed_tokens, num_written_tokens from workload_layouts").fetchall()
        assert kept == [(num_tokens, before)]
        assert connection.execute("select count(*) from workload_row_layouts").fetchone() == (6,)
    first = read_requests(source, chosen, tmp_path / "first")
    assert (
        len({first[row]["row_layout"] for row in range(6)}) == len({first[row]["row_layout"] for row in range(12)}) - 1
    )

    # A row's content key is that of a workload that is written in its order.
    for order in split_prompt(workload).orders:
        name = ",".join(map(str, order))
        alone = read_requests(source, arrange_workload(workload, order), tmp_path / f"alone-{name}")
        for number, row in first.items():
            is_same = (row["row_layout"] or ",".join(map(str, base_of(source)))) == name
            assert (row["content_key"] == alone[number]["content_key"]) == is_same

    # The next night finds all of it as it was, and new rows go into the order of the workload.
    with duckdb.connect(str(source.database)) as connection:
        connection.execute("insert into given values ('99', 'new', 'new', 'new')")
    (again,) = settle_layouts(source, [workload])
    second = read_requests(source, again, tmp_path / "second")
    assert {number: second[number]["content_key"] for number in first} == {
        number: row["content_key"] for number, row in first.items()
    }
    assert second[99]["row_layout"] is None


def base_of(source: Source) -> list[int]:
    with duckdb.connect(str(source.database)) as connection:
        ((order,),) = connection.execute("select part_order from workload_layouts").fetchall()
    return list(order)


def test_little_gain_changes_no_order_and_another_template_is_chosen_for_anew(
    case: tuple[Source, Workload], tmp_path: Path
) -> None:
    source, workload = case
    (chosen,) = settle_layouts(source, [workload])
    first = read_requests(source, chosen, tmp_path / "first")
    with duckdb.connect(str(source.database)) as connection:
        connection.execute("update given set a = a || '!' where id = '0'")
    (again,) = settle_layouts(source, [workload])
    second = read_requests(source, again, tmp_path / "second")
    assert [second[row]["row_layout"] for row in second] == [first[row]["row_layout"] for row in first]
    changed = replace(workload, prompt=replace(workload.prompt, template=workload.prompt.template + " "))
    assert use_kept(source.database, changed).row_layouts is None
    (other,) = settle_layouts(source, [changed])
    with duckdb.connect(str(source.database)) as connection:
        digests = connection.execute("select count(distinct template_digest) from workload_row_layouts")
        assert digests.fetchone() == (1,)
    assert other.row_layouts is not None


def test_every_prompt_is_made_once(
    case: tuple[Source, Workload], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts by which a layout was chosen are those that are answered, and a kept layout needs none."""
    source, workload = case
    (chosen,) = settle_layouts(source, [workload])

    def write_tokens(*_: Any, **__: Any) -> None:
        pytest.fail("prompts are made again")

    monkeypatch.setattr("tasks.tokenize.write_tokens", write_tokens)
    assert measure_sharing(source, [chosen], tmp_path / "night", cache=source.database).num_processed_tokens > 0
    (again,) = settle_layouts(source, [workload])
    assert again.prompt == chosen.prompt
