"""Chosen layouts: never more tokens than as written, and no orders of several workloads share more text."""

from itertools import count, permutations, product
from pathlib import Path

import duckdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.layouts import estimate
from tasks.layouts.estimate import PartTexts, count_bytes, find_orders
from tasks.layouts.parts import split_prompt
from tasks.layouts.search import Candidate, LayoutSearch
from tasks.read import read_requests
from tasks.workloads.workload import Workload, load_workload

WORKLOAD = """
name = "w{number}"
mode = "score"
requests_sql = "rows.sql"
key = ["id"]
labels = ["yes", "no"]
[prompt]
chat = false
template = '''{template}'''
[output]
table = "w{number}"
"""

PARTS = ["Document: {a}", "Question: {b}\nof {a}", "Task: answer number NUMBER", "Customer: {c}"]

HASHES = np.random.default_rng(0).integers(1 << 63, size=6, dtype=np.uint64)
PART = st.lists(st.integers(0, 3), min_size=6, max_size=6)


@st.composite
def part_texts(draw: st.DrawFn) -> PartTexts:
    """Six rows of a workload with two or three parts, of few different texts."""
    parts = [draw(PART) for _ in range(draw(st.integers(2, 3)))]
    num_bytes = tuple(np.array([7 * text % 11 + 1 for text in part], np.int64) for part in parts)
    return PartTexts(
        head=int(HASHES[draw(st.integers(4, 5))]), hashes=tuple(HASHES[part] for part in parts), num_bytes=num_bytes
    )


def count_naively(workloads: list[PartTexts], orders: list[tuple[int, ...]]) -> int:
    """Bytes of every different beginning, one row after the other."""
    seen: dict[tuple[int, ...], int] = {}
    for texts, order in zip(workloads, orders, strict=True):
        for row in range(6):
            for end in range(1, len(order) + 1):
                beginning = (texts.head, *(int(texts.hashes[number][row]) for number in order[:end]))
                seen[beginning] = int(texts.num_bytes[order[end - 1]][row])
    return sum(seen.values())


@given(st.lists(part_texts(), min_size=1, max_size=3), st.booleans())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_orders_together_compute_less(
    monkeypatch: pytest.MonkeyPatch, workloads: list[PartTexts], is_exhaustive: bool
) -> None:
    choices = [list(permutations(range(len(texts.hashes)))) for texts in workloads]
    with monkeypatch.context() as patched:
        if not is_exhaustive:
            patched.setattr(estimate, "MOST_COMBINATIONS", 0)
        found = find_orders(workloads, choices)
    naive = {orders: count_naively(workloads, list(orders)) for orders in product(*choices)}
    assert all(count_bytes(workloads, list(orders)) == num_bytes for orders, num_bytes in naive.items())
    assert naive[tuple(found)] <= naive[tuple(choice[0] for choice in choices)]
    if is_exhaustive or len(workloads) <= 2:
        assert naive[tuple(found)] == min(naive.values())


def make_workload(folder: Path, number: int, parts: list[str]) -> Workload:
    text = "\n\n".join(parts).replace("NUMBER", str(number)) + "\nAnswer:"
    path = folder / f"w{number}.toml"
    path.write_text(WORKLOAD.format(number=number, template=text))
    return load_workload(path)


FOLDERS = count()


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
    (folder / "rows.sql").write_text("select id, a, b, c from given")
    with duckdb.connect(str(folder / "team.duckdb")) as connection:
        connection.execute("create table given (id text, a text, b text, c text)")
        connection.executemany("insert into given values (?, ?, ?, ?)", [(str(i), *row) for i, row in enumerate(rows)])
    candidates = []
    for number, parts in enumerate(layouts):
        if not any("{" in part for part in parts):
            parts = [*parts, PARTS[0]]
        workload = make_workload(folder, number, parts)
        run = folder / f"run-{number}"
        run.mkdir()
        requests = read_requests(folder / "team.duckdb", workload, "model", run).requests
        orders = list(permutations(split_prompt(workload).written))
        candidates.append(Candidate(workload=workload, requests=requests, orders=orders))
    search = LayoutSearch(tiny_llama, 1024, "exact", folder)
    written = [each.orders[0] for each in candidates]
    best = search.find_best(candidates)
    assert search.count_tokens(candidates, best) <= search.count_tokens(candidates, written)
