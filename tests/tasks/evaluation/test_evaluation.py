"""Metrics from SQL against scikit-learn's on random answers, intervals against chance, and gold that cannot be used."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError, DatabaseError
from sql import statement
from tasks.answers.head_score import HeadScore
from tasks.database.connection import connect, execute
from tasks.database.schema import create_schema
from tasks.evaluation import evaluation as evaluation_module
from tasks.evaluation.evaluation import Evaluation, evaluate_answers
from tasks.evaluation.threshold import Threshold
from tasks.workloads.workload import Workload, load_workload

RANKING = load_workload("ranking")
SNIPPETS = load_workload("snippets")


@pytest.fixture(scope="module")
def sk() -> Any:
    """scikit-learn's metrics, which take a second to import: only where they are compared with."""
    from sklearn import metrics

    return metrics


@pytest.fixture
def few_replicates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the values are of interest."""
    monkeypatch.setattr(evaluation_module, "MOST_REPLICATES", 20)


@pytest.fixture(scope="module")
def new_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `database` begins with, made once; to be copied."""
    path = tmp_path_factory.mktemp("evaluation") / "team.duckdb"
    with connect(path, create=True) as connection:
        create_schema(connection)
        connection.execute("insert into documents select 'd' || i, 't', 'b' from range(400) as numbers (i)")
        connection.execute("insert into queries select 'q' || i, 'x' from range(40) as numbers (i)")
    return path


@pytest.fixture
def database(new_database: Path, tmp_path: Path) -> Path:
    return shutil.copyfile(new_database, tmp_path / "team.duckdb")


def sql(path: Path, query: str, parameters: Any = None) -> list[tuple[Any, ...]]:
    with duckdb.connect(str(path)) as connection:
        return connection.execute(query, parameters).fetchall()


def add_rankings(path: Path, scores: Sequence[float], run_id: str = "r1", day: int = 1) -> None:
    """Answers to (q0, d0), (q1, d1), ..., ten queries in turn, each the more probable of yes and no."""
    rows = [
        [
            f"q{n % 10}", f"d{n}", score, "yes" if score >= 0.5 else "no",
            [math.log(score), math.log(1 - score)], run_id, f"2026-01-{day:02d} 00:00:00+00",
        ]
        for n, score in enumerate(scores)
    ]  # fmt: skip
    with duckdb.connect(str(path)) as connection:
        connection.execute("delete from ranking_candidates")
        connection.executemany(
            "insert into rankings (query_id, doc_id, score, label, label_logprobs, status, run_id, created_at)"
            " values (?, ?, ?, ?, ?, 'ok', ?, ?)",
            rows,
        )
        connection.execute("insert into ranking_candidates select distinct query_id, doc_id from rankings")


def add_gold(path: Path, labels: Sequence[str]) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute("create or replace table gold (query_id text, doc_id text, label text)")
        rows = [[f"q{n % 10}", f"d{n}", label] for n, label in enumerate(labels)]
        connection.executemany("insert into gold values (?, ?, ?)", rows)


def values_of(evaluation: Evaluation, reference: str = "gold") -> dict[tuple[str, str, str | None], float]:
    found = [each for each in evaluation.metrics if each.reference == reference]
    return {(each.column_name, each.metric, each.label): each.value for each in found}


@pytest.mark.usefixtures("few_replicates")
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(st.floats(0.01, 0.99), st.sampled_from(["yes", "no"])), min_size=2, max_size=40))
def test_metrics_are_scikit_learns(database: Path, sk: Any, rows: list[tuple[float, str]]) -> None:
    sql(database, "delete from rankings")
    scores, expected = [score for score, _ in rows], [label for _, label in rows]
    answered = ["yes" if score >= 0.5 else "no" for score in scores]
    add_rankings(database, scores)
    add_gold(database, expected)
    found = values_of(evaluate_answers.fn(database, RANKING, "gold", k=3))

    assert found["label", "accuracy", None] == pytest.approx(sk.accuracy_score(expected, answered))
    labels = sorted({*expected, *answered})
    precision, recall, f1, _ = sk.precision_recall_fscore_support(expected, answered, labels=labels, zero_division=0.0)
    for number, label in enumerate(labels):
        assert found["label", "f1", label] == pytest.approx(f1[number])
        assert found.get(("label", "precision", label), 0.0) == pytest.approx(precision[number])
        assert found.get(("label", "recall", label), 0.0) == pytest.approx(recall[number])
    assert found["label", "macro_f1", None] == pytest.approx(np.mean(f1))
    if len(labels) > 1:
        assert found["label", "kappa", None] == pytest.approx(sk.cohen_kappa_score(expected, answered))
    events = [label == "yes" for label in expected]
    assert found["score", "brier_score", None] == pytest.approx(np.mean((np.array(scores) - events) ** 2))
    assert found["score", "ece", None] == pytest.approx(expected_calibration_error(scores, events))
    confidences = [max(score, 1 - score) for score in scores]
    is_right = [one == other for one, other in zip(expected, answered, strict=True)]
    assert found["label", "ece", None] == pytest.approx(expected_calibration_error(confidences, is_right), abs=1e-9)
    both = ["no", "yes"]
    matrix = sk.confusion_matrix(expected, answered, labels=both)
    for expected_label, answer, num_rows in sql(
        database,
        "select expected, answer, num_rows from evaluation_confusion"
        " where evaluation_id = (select max(evaluation_id) from evaluations where created_at ="
        " (select max(created_at) from evaluations))",
    ):
        assert matrix[both.index(expected_label), both.index(answer)] == num_rows


def expected_calibration_error(confidences: Sequence[float], is_right: Sequence[bool]) -> float:
    tenths = np.minimum(np.floor(np.array(confidences) * 10), 9)
    gaps = np.array(is_right, dtype=float) - np.array(confidences)
    return float(sum(abs(gaps[tenths == tenth].sum()) for tenth in range(10)) / len(gaps))


@pytest.mark.usefixtures("few_replicates")
def test_ranks_are_judged_as_scikit_learn_does(database: Path, sk: Any) -> None:
    rng = np.random.default_rng(3)
    scores, grades = rng.uniform(0.01, 0.99, 120), rng.integers(0, 4, 120)
    add_rankings(database, scores.tolist())
    with duckdb.connect(str(database)) as connection:
        connection.execute("create table gold (query_id text, doc_id text, relevance integer)")
        connection.executemany(
            "insert into gold values (?, ?, ?)", [[f"q{n % 10}", f"d{n}", int(grade)] for n, grade in enumerate(grades)]
        )
    found = values_of(evaluate_answers.fn(database, RANKING, "gold", k=5))
    of_query = [(grades[query::10], scores[query::10]) for query in range(10)]
    gains = [sk.ndcg_score([grade], [score], k=5) for grade, score in of_query]
    assert found["rank", "ndcg@5", None] == pytest.approx(np.mean(gains))
    first = [1 / (1 + np.flatnonzero(grade[np.argsort(-score)] > 0)[0]) for grade, score in of_query]
    assert found["rank", "mrr", None] == pytest.approx(np.mean(first))


@pytest.mark.usefixtures("few_replicates")
def test_a_list_without_any_relevant_row_counts_as_0(database: Path) -> None:
    """As in trec_eval, whatever else gold names of the list; a query without any list counts for coverage alone."""
    add_rankings(database, [0.9] * 10 + [0.1] * 90)  # d0 is the first of query q0, d1 of q1, and so on
    sql(database, "create table gold (query_id text, doc_id text, relevance integer)")
    sql(database, "insert into gold select 'q' || i, if(i < 5, 'd' || i, 'elsewhere'), 1 from range(10) as x (i)")
    sql(database, "insert into gold values ('q-new', 'd0', 1)")
    found = {each.metric: each for each in evaluate_answers.fn(database, RANKING, "gold").metrics}
    assert found["mrr"].value == found["ndcg@10"].value == pytest.approx(0.5)
    assert (found["mrr"].num_rows, found["coverage"].num_rows) == (10, 11)
    assert found["coverage"].value == pytest.approx(5 / 11)
    sql(database, "insert into gold select 'q' || i, 'd' || (i + 10), 0 from range(10) as x (i)")
    found = {each.metric: each for each in evaluate_answers.fn(database, RANKING, "gold").metrics}
    assert found["ndcg@10"].value == pytest.approx(0.5)


@pytest.mark.usefixtures("few_replicates")
def test_ranks_of_a_run_are_among_its_own_answers(database: Path, sk: Any) -> None:
    """A later run answers the best row again, as the worst: the earlier run's next one is then the first of the
    newest answers, too."""
    sql(database, "insert into ranking_candidates select 'q0', 'd' || i from range(4) as rows (i)")
    add = "insert into rankings (query_id, doc_id, score, status, run_id, created_at) values ('q0', ?, ?, 'ok', ?, ?)"
    ranked = {"keys": RANKING.key, "rank_within": "query_id", "table": "rankings"}
    for run_id, day, scores in (("r1", 1, (0.9, 0.8, 0.7, 0.6)), ("r2", 2, (0.1,))):
        with connect(database) as connection:
            for n, score in enumerate(scores):
                connection.execute(add, [f"d{n}", score, run_id, f"2026-01-0{day} 00:00:00+00"])
            execute(connection, "write/rank_answers", {"run_id": run_id}, **ranked)
    sql(
        database, "create table gold as select 'q0' as query_id, 'd' || i as doc_id, 1 as relevance from range(2) t (i)"
    )
    first = values_of(evaluate_answers.fn(database, RANKING, "gold", run_id="r1"))
    newest = values_of(evaluate_answers.fn(database, RANKING, "gold"))
    assert first["rank", "ndcg@10", None] == pytest.approx(1)
    assert newest["rank", "ndcg@10", None] == pytest.approx(sk.ndcg_score([[1, 1, 0, 0]], [[0.1, 0.8, 0.7, 0.6]]))


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    """Shares by Wilson's formula, means by the bootstrap: 95% of intervals, within what 400 trials leave to chance."""
    rng = np.random.default_rng(5)
    with duckdb.connect() as connection:
        for name in ("batchloom_wilson_low", "batchloom_wilson_high", "weight_of"):
            connection.execute(statement(f"evaluate/macros/{name}"))
        hits = rng.binomial(30, 0.8, 400)
        shares = connection.execute(
            "select batchloom_wilson_low(x, 30), batchloom_wilson_high(x, 30) from (select unnest(?::bigint[]) as x)",
            [hits.tolist()],
        ).fetchall()
        assert 0.90 < np.mean([low <= 0.8 <= high for low, high in shares]) <= 0.99
        assert connection.execute(
            "select batchloom_wilson_low(0, 9), batchloom_wilson_high(9, 9)"
        ).fetchone() == pytest.approx((0, 1))
        connection.execute(
            "create table sample as select trial, row, hash('s', trial * 1000 + row) / 18446744073709551616 as x"
            " from range(200) as trials (trial), range(60) as rows (row)"
        )
        bounds = connection.execute(
            "with resampled as (select trial, replicate,"
            " sum(weight_of(hash(trial, row), replicate) * x) / sum(weight_of(hash(trial, row), replicate)) as value"
            " from sample, range(1, 301) as replicates (replicate) group by all)"
            " select quantile_cont(value, 0.025), quantile_cont(value, 0.975) from resampled group by trial"
        ).fetchall()
        assert 0.88 < np.mean([low <= 0.5 <= high for low, high in bounds]) <= 0.99


def test_intervals_of_a_reliability_diagram_stay_between_0_and_1() -> None:
    """Rounding takes those of 15 wrong rows below, and those of 18 right ones above."""
    with duckdb.connect() as connection:
        for name in (
            "macros/batchloom_wilson_low", "macros/batchloom_wilson_high", "create_evaluated_rows",
            "create_calibration_view",
        ):  # fmt: skip
            connection.execute(statement(f"evaluate/{name}"))
        connection.execute(
            "insert into evaluated_rows by name select 'e' as evaluation_id, 'gold' as reference,"
            " number::text || is_right as column_name, 0.55 as confidence, is_right"
            " from range(1, 99) as numbers (number), range(number), unnest([true, false]) as answers (is_right)"
        )
        rows = connection.execute("select low, high from evaluation_calibration").fetchall()
    assert len(rows) == 196
    assert all(0 <= low <= high <= 1 for low, high in rows)


@pytest.mark.usefixtures("few_replicates")
@pytest.mark.parametrize("num_rows", [1, 5, 6])
def test_a_bootstrap_of_few_rows_has_no_interval(database: Path, num_rows: int) -> None:
    """Wilson's interval is as wide as it must be."""
    add_rankings(database, ([0.9, 0.3] * 3)[:num_rows])
    add_gold(database, (["yes"] * 4 + ["no"] * 2)[:num_rows])
    for each in evaluate_answers.fn(database, RANKING, "gold").metrics:
        is_share = each.metric in ("accuracy", "coverage", "precision", "recall")
        assert (each.low is not None) == (each.high is not None) == (is_share or each.num_rows == 6), each


@pytest.mark.usefixtures("few_replicates")
def test_an_error_of_0_or_1_in_each_row_is_no_share(tmp_path: Path) -> None:
    """Wilson's interval would end at 1, which the error of another row may exceed."""
    path = tmp_path / "team.duckdb"
    sql(
        path,
        "create table latest_snippets as select i::varchar as doc_id, 'q' as query_id, 'ok' as status, 'r' as run_id,"
        " now() as created_at, '' as content_key, 3 as total from range(8) as rows (i)",
    )
    sql(path, "create table gold as select doc_id, query_id, 4 as total from latest_snippets")
    found = {each.metric: each for each in evaluate_answers.fn(path, SNIPPETS, "gold").metrics}
    assert (found["mean_absolute_error"].value, found["mean_absolute_error"].high) == (1, None)
    assert found["exact_match"].high == pytest.approx(0.324, abs=0.001)


@pytest.mark.usefixtures("few_replicates")
@pytest.mark.parametrize("labels", [("yes", "no"), ("yes", "yes")])
def test_a_bootstrap_of_equal_rows_has_no_interval(database: Path, labels: tuple[str, str]) -> None:
    """All answers are right, as sure of it: that is no proof that all others would be."""
    add_rankings(database, [0.9 if label == "yes" else 0.1 for label in labels * 6])
    add_gold(database, labels * 6)
    found = {each.metric: each for each in evaluate_answers.fn(database, RANKING, "gold").metrics}
    for name in {"f1", "macro_f1", "kappa", "brier_score"} & found.keys():
        assert (found[name].low, found[name].high) == (None, None), name
    assert found["macro_f1"].value == 1
    assert found["accuracy"].low is not None
    assert found["accuracy"].low < 0.8


@pytest.mark.usefixtures("few_replicates")
def test_texts_count_equal_words(database: Path) -> None:
    answers = {
        "d0": ("A Night  watchman.", "a night watchman"),
        "d1": ("same text ", "same text"),
        "d2": ("the the house", "the house"),
        "d3": ("...", "..."),
        "d4": (None, "it failed"),
        "d5": ("\u0915\u0940", "\u0915\u093f"),  # words of Hindi that differ in a vowel sign
        "d6": (
            "\u5927\u5bb6\u597dDuckDB 2",
            "duckdb 2 \u5927\u5bb6",
        ),  # Chinese has no spaces: each character is a word
    }
    for doc_id, (answer, _) in answers.items():
        sql(
            database,
            "insert into snippets (doc_id, query_id, snippet, status, run_id, created_at)"
            " values (?, 'q0', ?, ?, 'r', now())",
            [doc_id, answer, "error" if answer is None else "ok"],
        )
        sql(database, "insert into snippet_requests values (?, 'q0')", [doc_id])
    sql(database, "create table gold (query_id text, doc_id text, snippet text)")
    for doc_id, (_, expected) in answers.items():
        sql(database, "insert into gold values ('q0', ?, ?)", [doc_id, expected])
    sql(database, "insert into gold values ('q0', 'd-never', 'not asked'), ('q0', 'd7', null)")
    evaluation = evaluate_answers.fn(database, SNIPPETS, "gold")
    found = values_of(evaluation)
    assert found["snippet", "exact_match", None] == pytest.approx(2 / 7), "the failed row is wrong"
    assert found["snippet", "token_f1", None] == pytest.approx((1 + 1 + 2 * 2 / 5 + 1 + 0 + 0 + 2 * 4 / 9) / 7)
    assert found["snippet", "coverage", None] == pytest.approx(6 / 8)
    assert (evaluation.num_gold_rows, evaluation.num_ok, evaluation.num_errors, evaluation.num_unanswered) == (
        9,
        6,
        1,
        2,
    )


@pytest.mark.usefixtures("few_replicates")
def test_two_runs_are_compared_row_by_row(database: Path, sk: Any) -> None:
    rng = np.random.default_rng(7)
    first = rng.uniform(0.1, 0.9, 60)
    second = np.clip(first + rng.normal(0, 0.2, 60), 0.05, 0.95)
    add_rankings(database, first.tolist(), "r1", 1)
    add_rankings(database, second.tolist(), "r2", 2)
    found = values_of(evaluate_answers.fn(database, RANKING, None, against="r1"), "r1")
    labels = [["yes" if score >= 0.5 else "no" for score in scores] for scores in (first, second)]
    assert found == {
        ("label", "agreement", None): pytest.approx(sk.accuracy_score(*labels)),
        ("label", "kappa", None): pytest.approx(sk.cohen_kappa_score(*labels)),
        ("score", "mean_absolute_error", None): pytest.approx(np.abs(first - second).mean()),
    }
    same = values_of(evaluate_answers.fn(database, RANKING, None, run_id="r2", against="r2"), "r2")
    assert same.pop(("score", "mean_absolute_error", None)) == 0
    assert set(same.values()) == {1.0}


@pytest.mark.usefixtures("few_replicates")
def test_rows_that_one_of_two_runs_could_not_answer_are_left_out(database: Path) -> None:
    """Whichever run is compared with the other."""
    for number, run_id in enumerate(("r1", "r2")):
        add_rankings(database, [0.9, 0.2, 0.8, 0.1], run_id, 1 + number)
        sql(
            database,
            "update rankings set status = 'error', score = null, label = null, label_logprobs = null"
            " where run_id = ? and doc_id = ?",
            [run_id, f"d{number}"],
        )
    for run_id, other in (("r1", "r2"), ("r2", "r1")):
        metrics = evaluate_answers.fn(database, RANKING, None, run_id=run_id, against=other).metrics
        found = [(each.metric, each.value, each.num_rows) for each in metrics]
        assert found == [("agreement", 1.0, 2), ("kappa", 1.0, 2), ("mean_absolute_error", 0.0, 2)]


@pytest.mark.usefixtures("few_replicates")
def test_scores_of_one_output_are_the_answers_of_its_runs(database: Path) -> None:
    """A reranker's only label is the same in each row; a bound on agreement would be met by any scores."""
    kind = HeadScore(labels=("LABEL_0",), score_label="LABEL_0", output=RANKING.kind.output)
    workload = replace(RANKING, kind=kind)
    for day, (run_id, scores) in enumerate({"r1": [0.9, 0.2, 0.4], "r2": [0.1, 0.3, 0.4]}.items(), start=1):
        add_rankings(database, scores, run_id, day)
    sql(database, "update rankings set label = 'LABEL_0'")
    found = evaluate_answers.fn(database, workload, None, against="r1").metrics
    assert [(each.column_name, each.metric) for each in found] == [("score", "mean_absolute_error")]
    assert found[0].value == pytest.approx(0.3)
    with pytest.raises(ConfigError, match="no metric 'agreement' was computed"):
        Threshold.parse("agreement=0.9", is_least=True).find_failures(found)


@pytest.mark.usefixtures("few_replicates")
def test_thoughts_of_two_runs_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / "mails.sql").write_text("select id, text from mails")
    (tmp_path / "mails.toml").write_text(
        'name = "mails"\nmode = "extract"\nthinking = "keep"\nmax_thinking_tokens = 64\n'
        'requests_sql = "mails.sql"\nkey = ["id"]\n[prompt]\ntemplate = "{text}"\n'
        '[output]\ntable = "totals"\n[columns]\ntotal = "INTEGER"\n'
    )
    workload, path = load_workload(tmp_path / "mails.toml"), tmp_path / "mails.duckdb"
    with connect(path, create=True) as connection:
        connection.execute("create table mails as select '1' as id, 'text' as text")
        create_schema(connection, workload)
        connection.execute(
            "insert into totals by name select '1' as id, 7 as total, r as thinking, 'ok' as status, r as run_id,"
            " now() as created_at from unnest(['r1', 'r2']) as runs (r)"
        )
    metrics = evaluate_answers.fn(path, workload, None, run_id="r2", against="r1").metrics
    assert {each.column_name for each in metrics} == {"total"}


@pytest.mark.usefixtures("few_replicates")
def test_a_workloads_table_may_have_any_name(database: Path) -> None:
    """Also that of a table which the evaluation itself makes."""
    add_rankings(database, [0.9, 0.2, 0.8, 0.1], run_id="r1")
    add_rankings(database, [0.9, 0.8, 0.8, 0.1], run_id="r2", day=2)
    output = replace(RANKING.kind.output, table="answers")
    workload = replace(RANKING, kind=replace(RANKING.kind, output=output))
    with connect(database) as connection:
        create_schema(connection, workload)
        connection.execute("insert into answers by name select * from rankings")
    add_gold(database, ["yes", "no", "yes", "no"])
    sql(database, "create table expected_rows as from gold")
    evaluation = evaluate_answers.fn(database, workload, "expected_rows", run_id="r2", against="r1")
    assert values_of(evaluation)["label", "accuracy", None] == 0.75
    assert values_of(evaluation, "r1")["label", "agreement", None] == 0.75


@pytest.mark.parametrize(
    "name", ["main.gold", "experts.judged", 'experts."by hand"', "by hand", '"a.b"', "GOLD", "views"]
)
def test_gold_is_named_as_in_sql(database: Path, name: str) -> None:
    add_rankings(database, [0.9, 0.2])
    add_gold(database, ["yes", "no"])
    sql(database, "create schema experts")
    for other in ("experts.judged", 'experts."by hand"', '"by hand"', '"a.b"'):
        sql(database, f"create table {other} as from gold")
    sql(database, "create view views as from experts.judged")
    evaluation = evaluate_answers.fn(database, RANKING, name)
    assert values_of(evaluation)["label", "accuracy", None] == 1.0
    assert sql(database, "select gold from evaluations") == [(name,)]


def test_columns_of_every_type_are_compared_as_what_they_are(tmp_path: Path) -> None:
    """The view of a workload with typed answers, as any mode may write it."""
    path = tmp_path / "typed.duckdb"
    sql(
        path,
        "create view latest_snippets as select 'd' || i as doc_id, 'q' as query_id, 'ok' as status, 'r' as run_id,"
        " now() as created_at, '' as content_key, i % 2 = 0 as urgent, 0.5 + i / 20 as urgent_probability,"
        " case when i < 5 then 'billing' else 'other' end as topic,"
        " map {'billing': 0.9::double, 'other': 0.1::double} as topic_probabilities,"
        " i::decimal(12, 2) as total, date '2026-01-01' + i::integer as due, [i, i + 1] as items,"
        " (case when i < 3 then 'EUR' else 'USD' end)::enum ('EUR', 'USD') as currency from range(10) as rows (i)",
    )
    sql(
        path,
        "create table gold as select 'd' || i as doc_id, 'q' as query_id, case when i < 9 then 'true' else 'no' end as"
        " urgent, 'billing' as topic, i + 0.5::double as total, '2026-01-02' as due, [i, 2] as items, 'EUR' as currency"
        " from range(10) as rows (i)",
    )
    found = values_of(evaluate_answers.fn(path, SNIPPETS, "gold"))
    assert found["urgent", "accuracy", None] == pytest.approx(0.6)
    assert found["topic", "recall", "billing"] == pytest.approx(0.5)
    assert found["topic", "ece", None] == pytest.approx((5 * 0.1 + 5 * 0.1) / 10, abs=0.01)
    assert (found["total", "exact_match", None], found["total", "mean_absolute_error", None]) == (0, 0.5)
    assert found["due", "exact_match", None] == pytest.approx(0.1)
    assert found["items", "exact_match", None] == pytest.approx(0.1)
    assert found["currency", "accuracy", None] == pytest.approx(0.3)
    for bad, message in {
        "update gold set total = 'nan' where doc_id = 'd3'": (
            "column 'total': 'nan' is not a finite number, in the row with doc_id 'd3', query_id 'q'"
        ),
        "update gold set total = '-inf' where doc_id = 'd3'": "column 'total': '-inf' is not a finite number",
        "update gold set total = 1, due = if(doc_id = 'd1', 'soon', due)": (
            "column 'due': 'soon' is not a value of type DATE, in the row with doc_id 'd1', query_id 'q'"
        ),
        "update gold set due = '2026-01-02', currency = 'CHF'": "column 'currency': 'CHF' is not such a label",
    }.items():
        sql(path, bad)
        with pytest.raises(DatabaseError, match=message):
            evaluate_answers.fn(path, SNIPPETS, "gold")


@pytest.mark.usefixtures("few_replicates")
@pytest.mark.parametrize(
    ("type_", "answer", "expected", "is_right"),
    [
        ("bigint", "9007199254740993", "9007199254740993", True),
        ("bigint", "9007199254740993", "9007199254740992", False),
        ("integer", "2", "1.5", False),
        ("integer", "1000", "'1e3'", True),
        ("integer", "3", "3.0::double", True),
        ("decimal(12, 2)", "12.5", "12.5::double", True),
        ("decimal(12, 2)", "12.5", "12.504", False),
        ("float", "0.1", "0.10", True),
        ("float", "0.1", "0.1::double", True),
        ("float", "1234567.9", "1234567.89", True),
        ("float", "0.1", "0.11", False),
        ("double", "0.1", "0.1::float", True),
        ("double", "9007199254740993", "9007199254740992", True),
        ("double", "0.1", "0.1000001", False),
        ("double", "'-0.0'", "0", True),
        ("double[]", "['-0.0', null]", "[0, null]", True),
        ("double[]", "[1.0, null]", "[1.0, 2.0]", False),
        ("integer[]", "[2]", "[1.5]", False),
        ("integer[]", "[2]", "[2.0]", True),
        ("decimal(12, 2)[]", "[12.5]", "[12.504]", False),
        ("decimal(12, 2)[]", "[12.5]", "[12.5]::double[]", True),
        ("struct(a integer, b text)", "{'a': 2, 'b': 'x'}", "{'a': 1.6, 'b': 'x'}", False),
        ("struct(a integer, b text)", "{'a': 2, 'b': 'x'}", "{'b': 'x', 'a': 2}", True),
        ("date", "'2026-01-31'", "timestamp '2026-01-31 23:59'", False),
        ("date", "'2026-01-31'", "'2026-01-31'", True),
        ("text", "'Yes'", "e' Yes\\n'", True),
        ("text", "'Yes'", "e'\u3000Yes\u00a0'", True),
        ("text", "'caf\u00e9'", "'cafe\u0301'", True),
        ("text", "'Yes'", "'No'", False),
    ],
)
def test_equal_means_the_same_value(tmp_path: Path, type_: str, answer: str, expected: str, is_right: bool) -> None:
    """Numbers are compared to the last digit, texts without white space at their ends."""
    path = tmp_path / "team.duckdb"
    sql(
        path,
        "create table latest_snippets as select 'd' as doc_id, 'q' as query_id, 'ok' as status, 'r' as run_id,"
        f" now() as created_at, '' as content_key, ({answer})::{type_} as found",
    )
    sql(path, f"create table gold as select 'd' as doc_id, 'q' as query_id, {expected} as found")
    values = values_of(evaluate_answers.fn(path, SNIPPETS, "gold"))
    assert values["found", "exact_match", None] == is_right
    assert type_ != "float" or (values["found", "mean_absolute_error", None] == 0) is is_right


@pytest.mark.usefixtures("few_replicates")
def test_null_is_an_answer_where_a_text_may_not_say(tmp_path: Path, sk: Any) -> None:
    """An extracted column is right where gold and answer are both NULL, and wrong where one of them is."""
    (tmp_path / "invoices.sql").write_text("select id, text from invoices")
    (tmp_path / "invoices.toml").write_text(
        'name = "invoices"\nmode = "extract"\nrequests_sql = "invoices.sql"\nkey = ["id"]\n'
        '[prompt]\ntemplate = "{text}"\n[output]\ntable = "invoice_values"\n'
        "[columns]\ncurrency = \"ENUM('EUR', 'USD')\"\ntotal = \"DECIMAL(12, 2)\"\n"
        'vendor = { type = "VARCHAR", not_null = true }\n'
    )
    path = tmp_path / "typed.duckdb"
    sql(
        path,
        "create view latest_invoice_values as select i::varchar as id, 'ok' as status, 'r' as run_id,"
        " now() as created_at, '' as content_key, (case i when 0 then 'EUR' end)::enum ('EUR', 'USD') as currency,"
        " case when i < 2 then 7.5 end::decimal(12, 2) as total, 'x' as vendor from range(4) as rows (i)",
    )
    sql(
        path,
        "create table gold as select i as id, case when i < 2 then 'EUR' end as currency,"
        " case i when 0 then 7.5 when 2 then 8 end as total, case i when 0 then 'x' end as vendor"
        " from range(4) as rows (i)",
    )
    found = values_of(evaluate_answers.fn(path, load_workload(tmp_path / "invoices.toml"), "gold"))
    assert found["currency", "accuracy", None] == pytest.approx(3 / 4)
    assert found["currency", "kappa", None] == pytest.approx(
        sk.cohen_kappa_score(*zip("EE", "EN", "NN", "NN", strict=True))
    )
    assert found["total", "exact_match", None] == pytest.approx(2 / 4)
    assert found["total", "mean_absolute_error", None] == 0
    assert found["vendor", "exact_match", None] == 1, "one row is judged"


@pytest.fixture
def mails(tmp_path: Path) -> tuple[Path, Workload]:
    """Three questions about each of eight mails, mode "decide", not answered yet."""
    (tmp_path / "mails.sql").write_text("select id, text from mails")
    (tmp_path / "mails.toml").write_text(
        'name = "mails"\nmode = "decide"\nrequests_sql = "mails.sql"\nkey = ["id"]\n'
        '[prompt]\ntemplate = "{text}"\n[output]\ntable = "mail_facets"\n[questions]\n'
        'urgent = { type = "BOOLEAN", ask = "Is it urgent?" }\n'
        "topic = { type = \"ENUM('billing', 'other')\", ask = \"What about?\" }\n"
        'tone = { type = "SCORE(1, 5)", ask = "How friendly?" }\n'
    )
    workload = load_workload(tmp_path / "mails.toml")
    path = tmp_path / "mails.duckdb"
    with connect(path, create=True) as connection:
        connection.execute("create table mails as select i::varchar as id, 'text' as text from range(8) as rows (i)")
        create_schema(connection, workload)
    return path, workload


@pytest.mark.usefixtures("few_replicates")
def test_each_question_of_a_row_is_judged(mails: tuple[Path, Workload]) -> None:
    """Mode "decide": truth values and choices with their probabilities, scores; its books are no answer."""
    path, workload = mails
    with connect(path) as connection:
        connection.execute(
            "insert into mail_facets by name select i::varchar as id, i < 4 as urgent,"
            " 0.9 - i / 10 as urgent_probability, 'billing' as topic,"
            " map {'billing': 0.75::double, 'other': 0.25::double} as topic_probabilities,"
            " 1 + i / 2 as tone, 'ok' as status, 'r' || i % 2 as run_id, now() as created_at from range(8) as rows (i)"
        )
        connection.execute(
            "create table gold as select i as id, i < 6 as urgent, if(i < 6, 'billing', 'other') as topic, 3 as tone"
            " from range(8) as rows (i)"
        )
    evaluation = evaluate_answers.fn(path, workload, "gold")
    found = values_of(evaluation)
    assert {column for column, _, _ in found} == {"urgent", "topic", "tone"}
    assert found["urgent", "accuracy", None] == found["topic", "accuracy", None] == 0.75
    assert found["urgent", "recall", "true"] == pytest.approx(4 / 6)
    assert found["topic", "ece", None] == pytest.approx(0)
    assert found["tone", "mean_absolute_error", None] == pytest.approx(sum(abs(i / 2 - 2) for i in range(8)) / 8)
    sql(path, "create table misspelled as select id, 'Billing' as topic from gold")
    with pytest.raises(DatabaseError, match="column 'topic': 'Billing' is not one of the labels 'billing', 'other'"):
        evaluate_answers.fn(path, workload, "misspelled")
    sql(path, "alter table gold add column note text")
    with pytest.raises(DatabaseError, match=r"it answers urgent, topic, tone$"):
        evaluate_answers.fn(path, workload, "gold")


@pytest.mark.usefixtures("few_replicates")
def test_a_question_that_failed_leaves_the_rows_other_answers_right(mails: tuple[Path, Workload]) -> None:
    """Of each second mail, the prompt about the topic is too long."""
    path, workload = mails
    sql(
        path,
        "insert into mail_facets by name select i::varchar as id, true as urgent, 0.75 as urgent_probability,"
        " if(i % 2 = 0, 'billing', null) as topic, if(i % 2 = 0, 'ok', 'error') as status, r as run_id,"
        " now() as created_at from range(8) as rows (i), unnest(['r1', 'r2']) as runs (r)",
    )
    sql(path, "create table gold as select id, true as urgent, 'billing' as topic from mails")
    evaluation = evaluate_answers.fn(path, workload, "gold", run_id="r2", against="r1")
    found = values_of(evaluation)
    assert (evaluation.num_ok, evaluation.num_errors) == (4, 4)
    assert (found["urgent", "accuracy", None], found["urgent", "coverage", None]) == (1, 1)
    assert found["urgent", "ece", None] == pytest.approx(0.25)
    assert (found["topic", "accuracy", None], found["topic", "coverage", None]) == (0.5, 0.5)
    compared = {each.column_name: each.num_rows for each in evaluation.metrics if each.metric == "agreement"}
    assert compared == {"urgent": 8, "topic": 4}


@pytest.mark.usefixtures("few_replicates")
def test_a_question_that_a_row_was_not_asked_has_no_answer_there(mails: tuple[Path, Workload]) -> None:
    """A new question that a night with a deadline has asked of every second mail, in its second run."""
    path, workload = mails
    sql(
        path,
        "insert into mail_facets by name select i::varchar as id, true as urgent, if(r = 'r2', 'billing', null) as"
        " topic, 'ok' as status, r as run_id, if(r = 'r2', '2026-01-02', '2026-01-01')::timestamptz as created_at"
        " from range(8) as rows (i), unnest(['r1', 'r2']) as runs (r) where r = 'r1' or i % 2 = 0",
    )
    sql(path, "create table gold as select id, true as urgent, 'billing' as topic from mails")
    evaluation = evaluate_answers.fn(path, workload, "gold")
    found = values_of(evaluation)
    assert (found["urgent", "accuracy", None], found["urgent", "coverage", None]) == (1, 1)
    assert (found["topic", "accuracy", None], found["topic", "coverage", None]) == (1, 0.5)
    assert {label for _, _, label in found} == {None, "true", "billing"}
    state = "{'digest': 'd', 'finish_reason': 'invalid', 'error': 'too long'}"
    sql(path, f"update mail_facets set status = 'error', question_states = map {{'tone': {state}}} where id < '2'")
    found = values_of(evaluate_answers.fn(path, workload, "gold"))
    assert (found["topic", "accuracy", None], found["topic", "coverage", None]) == (1, 0.5), "another question failed"
    for run_id, other in ((None, "r1"), ("r1", "r2")):
        metrics = evaluate_answers.fn(path, workload, None, run_id=run_id, against=other).metrics
        assert {each.column_name for each in metrics if each.metric == "agreement"} == {"urgent"}


@pytest.mark.usefixtures("few_replicates")
def test_the_time_on_the_report_page_is_utc_in_any_session(database: Path) -> None:
    add_rankings(database, [0.9, 0.2])
    add_gold(database, ["yes", "no"])
    evaluate_answers.fn(database, RANKING, "gold")
    ((utc,),) = sql(database, "select strftime(created_at at time zone 'UTC', '%Y-%m-%d %H:%M:%S') from evaluations")
    with duckdb.connect(str(database)) as connection:
        connection.execute("set timezone = 'Asia/Tokyo'")
        row = connection.sql(statement("report/evaluation/summary"), params={"run_id": "r1"})
        assert row.fetchall()[0][row.columns.index("created_at_utc")] == utc


@pytest.mark.usefixtures("few_replicates")
def test_the_pages_query_of_wrong_answers_leaves_out_right_ones(database: Path) -> None:
    """A small probability of an event that did not occur is no wrong answer."""
    add_rankings(database, [0.9, 0.02, 0.8])
    add_gold(database, ["yes", "no", "no"])
    evaluate_answers.fn(database, RANKING, "gold")
    page = Path(__file__).parents[3] / "docs" / "evaluation.md"
    block = page.read_text(encoding="utf-8").partition("The wrong answers of the last evaluation")[2].split("\n\n")[1]
    assert sql(database, block) == [(["q2", "d2"], "label", "no", "yes", pytest.approx(0.8))]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ("select 1", "gold 'gold': no table or view 'gold'"),
        (
            "create table x (i int); create view gold as from x; drop table x",
            "gold 'gold': no table or view 'x'",
        ),
        ("create table gold (doc_id text, label text)", "has no column 'query_id' of the key; it has doc_id, label"),
        ("create table gold (query_id text, doc_id text)", "has no column to compare; the answers have score, label"),
        ("create table gold (query_id text, doc_id text, label text, x int)", "a column 'x', which .* does not answer"),
        ("create table gold (query_id text, doc_id text, label text)", "gold table 'gold' is empty"),
        (
            "create table gold as select 'q0' as query_id, 'd0' as doc_id, 'yes' as label from range(2)",
            "2 rows with query_id 'q0', doc_id 'd0'; one is expected",
        ),
        (
            "create table gold as select 'q0' as query_id, null::text as doc_id, 'yes' as label",
            "a row with query_id 'q0', doc_id NULL",
        ),
        (
            "create table gold as select 'Q' as query_id, 'd0' as doc_id, 'yes' as label",
            "no row of gold table 'gold' has an answer of workload 'ranking'; its first is query_id 'Q'",
        ),
        (
            "create table gold as select 'q0' as query_id, 'd0' as doc_id, 'Yes' as label",
            "column 'label': 'Yes' is not one of the labels 'yes', 'no'",
        ),
        (
            "create table gold as select 'q0' as query_id, 'd0' as doc_id, -1 as relevance",
            "column 'relevance': '-1' is not a grade of relevance",
        ),
        (
            "create table gold as select 'q0' as query_id, 'd0' as doc_id, 'nan'::double as relevance",
            "column 'relevance': 'nan' is not a grade of relevance, 0 or above, in the row with query_id 'q0'",
        ),
        (
            "create table gold as select 'q0' as query_id, 'd0' as doc_id, 'maybe' as score",
            "column 'score': 'maybe' is not true or false",
        ),
        (
            "create table gold as select 'q0' as query_id, 'd0' as doc_id, null::text as label, null::int as relevance",
            "gold table 'gold' judges nothing: each value of 'label', 'relevance' is NULL",
        ),
    ],
)
def test_gold_that_cannot_be_used_is_refused_in_a_line(database: Path, make: str, message: str) -> None:
    add_rankings(database, [0.4, 0.6])
    sql(database, make)
    with pytest.raises(DatabaseError, match=message) as caught:
        evaluate_answers.fn(database, RANKING, "gold")
    assert "\n" not in str(caught.value)
    assert not sql(database, "select * from information_schema.tables where table_name like 'evaluat%'")


@pytest.mark.usefixtures("few_replicates")
@pytest.mark.parametrize("view", ["latest_evaluation_metrics", "Evaluation_Confusion", "evaluation_calibration"])
def test_a_users_own_view_is_not_replaced(database: Path, view: str) -> None:
    add_rankings(database, [0.4, 0.6])
    add_gold(database, ["yes", "no"])
    sql(database, f"create view {view} as select 1 as mine")
    message = f"team.duckdb: batchloom has not made the view '{view.lower()}' and would replace it: rename it"
    with pytest.raises(DatabaseError, match=message):
        evaluate_answers.fn(database, RANKING, "gold")
    assert sql(database, f"from {view}") == [(1,)]
    sql(database, f"alter view {view} rename to own")
    for _ in range(2):  # its own views are replaced
        assert evaluate_answers.fn(database, RANKING, "gold").num_gold_rows == 2


def test_what_was_never_answered_is_refused(database: Path) -> None:
    sql(database, "create table gold as select 'q0' as query_id, 'd0' as doc_id, 'yes' as label")
    with pytest.raises(DatabaseError, match="'ranking' has no answers yet"):
        evaluate_answers.fn(database, RANKING, "gold")
    add_rankings(database, [0.4])
    for options in ({"run_id": "r9"}, {"against": "r9"}):
        with pytest.raises(DatabaseError, match="run 'r9' has no answers in table 'rankings'"):
            evaluate_answers.fn(database, RANKING, "gold", **options)
    with pytest.raises(DatabaseError, match="nothing to compare the answers with"):
        evaluate_answers.fn(database, RANKING, None)


@pytest.mark.usefixtures("few_replicates")
def test_thresholds_name_what_misses_them(database: Path) -> None:
    add_rankings(database, [0.9, 0.8, 0.7, 0.2])
    add_gold(database, ["yes", "yes", "no", "no"])
    found = evaluate_answers.fn(database, RANKING, "gold").metrics

    def check(*texts: str, is_least: bool = True) -> list[str]:
        thresholds = [Threshold.parse(text, is_least=is_least) for text in texts]
        return [failure for each in thresholds for failure in each.find_failures(found)]

    assert check("accuracy=0.75", "label.recall.yes=1", "coverage=1") == []
    assert check("accuracy=0.8", "label.recall.no=0.9") == [
        "accuracy in label is 0.75, below 0.8",
        "recall of 'no' in label is 0.5, below 0.9",
    ]
    assert check("score.brier_score=0.1", is_least=False) == ["brier_score in score is 0.145, above 0.1"]
    assert check("LABEL.accuracy=0.75") == [], "SQL ignores the case of names"
    with pytest.raises(ConfigError, match=r"no metric 'acuracy' was computed; there are label.accuracy, label.cov"):
        check("acuracy=0.8")
    with pytest.raises(ConfigError, match=r"no metric 'label.recall.NO' .* label.recall.no, label.recall.yes$"):
        check("label.recall.NO=0.8")
    add_rankings(database, [0.9, 0.2, 0.7, 0.2], "r2", 2)
    found = evaluate_answers.fn(database, RANKING, None, run_id="r1", against="r2").metrics
    assert check("label.agreement=0.75", "kappa=0.5") == []
    assert check("kappa=0.6") == ["kappa in label is 0.5, below 0.6"]
    found = evaluate_answers.fn(database, RANKING, "gold", run_id="r2", against="r1").metrics
    assert check("agreement=0.75", "kappa=0") == []
    assert check("kappa=0.1") == ["kappa in label is 0, below 0.1"], "that with gold"
    means = [replace(found[0], metric="accuracy", value=value) for value in (0.7 - 1e-16, 26_999 / 30_000)]
    assert Threshold.parse("accuracy=0.7", is_least=True).find_failures(means) == [], "the mean of three 0.7 is less"
    assert Threshold.parse("accuracy=0.9", is_least=True).find_failures(means[1:]) == [
        "accuracy in label is 0.899967, below 0.9"
    ]
    for text in ("accuracy", "accuracy=", "=0.8", "accuracy=high", "label..yes=1", "accuracy=nan"):
        with pytest.raises(ConfigError, match="is not of the form"):
            check(text)


def test_the_same_rows_give_the_same_intervals(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer replicates for many rows, and also where they are compared with a run of few rows."""
    monkeypatch.setattr(evaluation_module, "MOST_DRAWS", 50 * 200)
    add_rankings(database, [0.5, 0.5], "r0")
    add_rankings(database, np.random.default_rng(1).uniform(0.01, 0.99, 50).tolist(), day=2)
    add_gold(database, ["yes", "no"] * 25)
    first, second = (
        [
            each
            for each in evaluate_answers.fn(database, RANKING, "gold", against=run).metrics
            if each.reference == "gold"
        ]
        for run in (None, "r0")
    )
    for one, other in zip(first, second, strict=True):  # sums of threads come in any order
        assert (one.column_name, one.metric, one.label) == (other.column_name, other.metric, other.label)
        assert (one.value, one.low, one.high) == pytest.approx((other.value, other.low, other.high), abs=1e-9)
    assert all(each.low <= each.value <= each.high for each in first if each.low is not None and each.metric != "ece")
