"""Calibrations: maps that rise, applied by the view as they were fitted, refused where gold is too thin."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from engine.errors import DatabaseError
from tasks.database.connection import connect
from tasks.database.schema import create_schema
from tasks.evaluation.calibration import Method, calibrate_answers, fit
from tasks.evaluation.evaluation import evaluate_answers
from tasks.workloads.workload import load_workload

RANKING = load_workload("ranking")
SNIPPETS = load_workload("snippets")
SAME = "0 rows are right and {} wrong; a calibration needs 5 of each"


def sql(path: Path, query: str, parameters: Any = None) -> list[tuple[Any, ...]]:
    with duckdb.connect(str(path)) as connection:
        return connection.execute(query, parameters).fetchall()


def too_sure(num_rows: int, seed: int = 1) -> tuple[Any, Any]:
    """Probabilities whose logits are three times what they should be and one too large, and what happened."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1.2, num_rows)
    happened = (rng.random(num_rows) < 1 / (1 + np.exp(-logits))).astype(float)
    return 1 / (1 + np.exp(-(3 * logits + 1))), happened


@pytest.fixture(scope="module")
def new_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `database` begins with, made once; to be copied."""
    path = tmp_path_factory.mktemp("calibration") / "team.duckdb"
    scores, happened = too_sure(120)
    with connect(path, create=True) as connection:
        create_schema(connection)
        connection.execute("insert into documents select 'd' || i, 't', 'b' from range(200) as numbers (i)")
        connection.execute("insert into queries values ('q', 'x')")
        connection.execute("insert into ranking_candidates select 'q', doc_id from documents")
        connection.executemany(
            "insert into runs (run_id, workload_digest, model_digest, model) values (?, ?, ?, 'tiny')",
            [["r1", RANKING.digest, "m"], ["r0", "another prompt", "m"]],
        )
        rows = [[f"d{n}", score, "r1"] for n, score in enumerate(scores)]
        rows += [[f"d{n}", 0.5, "r0"] for n in range(150, 160)]
        connection.executemany(
            "insert into rankings (query_id, doc_id, score, label, status, run_id, created_at)"
            " values ('q', ?, ?, 'yes', 'ok', ?, now())",
            rows,
        )
        connection.execute("create table gold (query_id text, doc_id text, label text)")
        labels = [[f"d{n}", "yes" if one else "no"] for n, one in enumerate(happened)]
        connection.executemany("insert into gold values ('q', ?, ?)", labels)
        connection.execute("insert into gold select 'q', 'd' || i, 'yes' from range(150, 160) as numbers (i)")
    return path


@pytest.fixture
def database(new_database: Path, tmp_path: Path) -> Path:
    return shutil.copyfile(new_database, tmp_path / "team.duckdb")


@pytest.mark.parametrize("method", ["platt", "isotonic"])
def test_the_view_gives_what_was_fitted_to_answers_of_this_workload_alone(database: Path, method: Method) -> None:
    (found,) = calibrate_answers.fn(str(database), RANKING, "gold", method)
    assert (found.column_name, found.method, found.num_rows) == ("score", method, 120)
    assert found.brier_after < found.brier_before
    rows = sql(
        database,
        "select doc_id, column_name, probability, calibrated_probability from calibrated_rankings order by all",
    )
    assert len(rows) == 130
    names = ["query_id", "doc_id", "run_id", "column_name", "probability", "calibrated_probability"]
    assert sql(database, "select list(column_name) from (describe calibrated_rankings)") == [(names,)]
    for doc_id, column, probability, calibrated in rows:
        assert column == "score"
        if int(doc_id[1:]) >= 150:
            assert calibrated is None, "another prompt gave this answer"
        else:
            assert calibrated == pytest.approx(float(found.apply(np.array([probability]))[0]), abs=1e-9)
    calibrate_answers.fn(str(database), RANKING, "gold", method)
    assert sql(database, "select count(*) from calibrations") == [(1,)], "fitted anew, the earlier map is gone"
    with duckdb.connect() as reader:
        reader.execute(f"attach '{database}' as team (read_only)")
        order = "doc_id, column_name, probability, calibrated_probability"
        assert reader.execute(f"select {order} from team.calibrated_rankings order by all").fetchall() == rows


def test_each_model_that_gave_newest_answers_has_its_own_map(database: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As after a cascade, whose large model answered the newest rows."""
    sql(database, "insert into runs (run_id, workload_digest, model_digest, model) values ('r2', ?, 'l', 'large')", [
        RANKING.digest
    ])  # fmt: skip
    sql(database, "update rankings set run_id = 'r2', created_at = now() where doc_id in ('d0', 'd1')")
    (found,) = calibrate_answers.fn(str(database), RANKING, "gold", "platt")
    assert (found.model, found.num_rows) == ("tiny", 118)
    reason = "2 rows that this workload and model answered; a calibration needs at least 50 (answers of large)"
    assert caplog.messages == [f"ranking: not calibrated: score: {reason}"]
    sql(database, "update rankings set run_id = 'r2' where doc_id < 'd5' and run_id = 'r1'")
    of_models = {each.model: each for each in calibrate_answers.fn(str(database), RANKING, "gold", "platt")}
    assert {name: each.num_rows for name, each in of_models.items()} == {"large": 65, "tiny": 55}
    assert sql(database, "select model_digest, num_rows from calibrations order by all") == [("l", 65), ("m", 55)]
    shown = "select probability, calibrated_probability from calibrated_rankings where doc_id = ?"
    for doc_id, model in (("d3", "large"), ("d7", "tiny")):
        ((probability, calibrated),) = sql(database, shown, [doc_id])
        assert calibrated == pytest.approx(float(of_models[model].apply(np.array([probability]))[0]), abs=1e-9)


def test_a_database_with_a_map_in_its_view_goes_on_and_is_fitted_anew(database: Path) -> None:
    """As views of calibrated answers were before the map had a name in the database."""
    sql(
        database,
        "create view calibrated_rankings as select query_id, doc_id, run_id, 'score' as column_name,"
        " score as probability, 1 / (1 + exp(-score)) as calibrated_probability from latest_rankings",
    )
    with connect(database) as connection:
        create_schema(connection, RANKING)
    assert len(sql(database, "from calibrated_rankings")) == 130
    (found,) = calibrate_answers.fn(str(database), RANKING, "gold", "platt")
    ((probability, calibrated),) = sql(
        database, "select probability, calibrated_probability from calibrated_rankings where doc_id = 'd7'"
    )
    assert calibrated == pytest.approx(float(found.apply(np.array([probability]))[0]), abs=1e-9)


@pytest.mark.parametrize("method", ["platt", "isotonic"])
def test_maps_rise_and_mend_what_is_too_sure(method: Method) -> None:
    probabilities, happened = too_sure(3000)
    found = fit(probabilities, happened, method)
    grid = found.apply(np.linspace(0, 1, 301))
    assert np.all(np.diff(grid) >= 0)
    assert 0 <= grid[0] < grid[-1] <= 1
    assert found.brier_after < 0.9 * found.brier_before
    if method == "platt":
        assert (found.slope, found.intercept) == (pytest.approx(1 / 3, abs=0.04), pytest.approx(-1 / 3, abs=0.1))
    assert fit(probabilities, happened, "auto").method == "isotonic"
    assert fit(probabilities[:200], happened[:200], "auto").method == "platt"
    for not_rising in (1 - probabilities, np.full(3000, 0.7)):
        with pytest.raises(ValueError, match="larger probabilities are not right more often"):
            fit(not_rising, happened, method)


def test_few_wrong_rows_make_no_step_of_the_curve() -> None:
    """Platt's targets: the accurate model is hardly ever wrong, which says little of where it is."""
    rng = np.random.default_rng(0)
    right, wrong = rng.uniform(0.75, 0.99, 55), rng.uniform(0.4, 0.7, 5)
    found = fit(np.concatenate([right, wrong]), np.repeat([1.0, 0.0], [55, 5]), "platt")
    assert 0.3 < found.apply(np.array([0.65]))[0] < 0.8
    assert found.brier_after > 0.005, "no fold is mapped by what was fitted to it"


def test_a_map_that_is_no_better_is_a_warning(database: Path, caplog: pytest.LogCaptureFixture) -> None:
    (mended,) = calibrate_answers.fn(str(database), RANKING, "gold", "platt")
    assert mended.brier_after < mended.brier_before
    assert caplog.messages == []
    rows = sql(database, "select doc_id, calibrated_probability from calibrated_rankings where run_id = 'r1'")
    with duckdb.connect(str(database)) as connection:
        connection.executemany("update rankings set score = $2 where doc_id = $1", rows)
    (again,) = calibrate_answers.fn(str(database), RANKING, "gold", "platt")
    assert again.brier_after > again.brier_before
    assert caplog.messages[0].startswith("ranking: score is better as it is: in five folds the error is 0.")


@pytest.fixture
def typed(tmp_path: Path) -> Path:
    """80 answers of an ENUM: `a` is likely or not, `b` is the other, and `c`, which gold never has, is unlikely."""
    path = tmp_path / "typed.duckdb"
    probabilities, happened = too_sure(80)
    sql(path, "create table runs (run_id text, workload_digest text, model_digest text, model text)")
    sql(path, "insert into runs values ('r', ?, 'm', 'tiny')", [SNIPPETS.digest])
    sql(
        path,
        "create table latest_snippets (doc_id text, query_id text, topic text, topic_probabilities map(text, double),"
        " status text, run_id text, created_at timestamptz, content_key text)",
    )
    sql(path, "create table gold (doc_id text, query_id text, topic text)")
    with duckdb.connect(str(path)) as connection:
        for number, (probability, one) in enumerate(zip(probabilities.tolist(), happened, strict=True)):
            connection.execute(
                "insert into latest_snippets values"
                " ($n, 'q', 'a', map {'a': $p, 'b': 1 - $p, 'c': 0.0}, 'ok', 'r', now(), '')",
                {"n": str(number), "p": probability},
            )
            connection.execute("insert into gold values (?, 'q', ?)", [str(number), "a" if one else "b"])
    return path


def test_each_label_that_can_be_calibrated_has_a_map_of_its_own(typed: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = {each.label: each for each in calibrate_answers.fn(str(typed), SNIPPETS, "gold", "platt")}
    assert sorted(found) == ["a", "b"]
    assert caplog.messages == [
        f"snippets: not calibrated: topic_probabilities of 'c': {SAME.format(80)} (answers of tiny)"
    ]
    unlikely = "select distinct calibrated_probability from calibrated_snippets_labels where label = 'c'"
    assert sql(typed, unlikely) == [(None,)]
    rows = sql(
        typed, "select label, probability, calibrated_probability from calibrated_snippets_labels where label <> 'c'"
    )
    assert len(rows) == 160
    names = ["doc_id", "query_id", "run_id", "column_name", "label", "probability", "calibrated_probability"]
    assert sql(typed, "select list(column_name) from (describe calibrated_snippets_labels)") == [(names,)]
    for label, probability, calibrated in rows:
        assert calibrated == pytest.approx(float(found[label].apply(np.array([probability]))[0]), abs=1e-9)


def test_the_view_without_labels_has_the_likeliest_one(typed: Path) -> None:
    calibrate_answers.fn(str(typed), SNIPPETS, "gold", "platt")
    shown = sql(typed, "select * exclude (run_id) from calibrated_snippets order by all")
    likeliest = sql(
        typed,
        "select doc_id, query_id, column_name, max(probability), max_by(calibrated_probability, probability)"
        " from calibrated_snippets_labels group by all order by all",
    )
    assert len(shown) == 80
    assert shown == likeliest


def test_the_one_probability_of_a_text_is_that_of_the_answer(typed: Path) -> None:
    """As extracted columns may have it: `a` is answered, and right where gold says `a`."""
    sql(
        typed,
        "create or replace table latest_snippets as select * exclude (topic_probabilities),"
        " topic_probabilities['a'] as topic_probability from latest_snippets",
    )
    (found,) = calibrate_answers.fn(str(typed), SNIPPETS, "gold", "platt")
    probabilities, happened = too_sure(80)
    assert (found.column_name, found.label, found.num_rows) == ("topic_probability", None, 80)
    assert found.brier_before == pytest.approx(((probabilities - happened) ** 2).mean())
    metrics = {each.metric: each.value for each in evaluate_answers.fn(typed, SNIPPETS, "gold").metrics}
    tenths = np.minimum(np.floor(probabilities * 10), 9)
    gaps = [abs((happened - probabilities)[tenths == tenth].sum()) for tenth in range(10)]
    assert metrics["ece"] == pytest.approx(sum(gaps) / 80)


def test_answers_of_a_row_count_though_another_question_of_it_failed(typed: Path) -> None:
    sql(typed, "update latest_snippets set status = 'error' where doc_id < '5'")
    found = calibrate_answers.fn(str(typed), SNIPPETS, "gold", "platt")
    assert [(each.label, each.num_rows) for each in found] == [("a", 80), ("b", 80)]
    assert sql(typed, "select count(calibrated_probability) from calibrated_snippets") == [(80,)]


def test_nothing_is_written_if_no_label_can_be_calibrated(typed: Path) -> None:
    sql(typed, "update gold set topic = 'd'")
    with pytest.raises(
        DatabaseError,
        match=rf"^gold table 'gold', topic_probabilities of 'a', 'b', 'c': {SAME.format(80)} \(answers of tiny\)$",
    ):
        calibrate_answers.fn(str(typed), SNIPPETS, "gold", "platt")
    assert not sql(typed, "select * from information_schema.tables where table_name like 'calibrat%'")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "delete from gold where doc_id > 'd3'",
            r"score: \d\d rows that this workload .*; a calibration needs at least 50",
        ),
        ("update gold set label = 'no'", f"gold table 'gold', score: {SAME.format(120)}"),
        (
            "update gold set label = if(doc_id in ('d1', 'd2', 'd3', 'd4'), 'yes', 'no')",
            "4 rows are right and 116 wrong",
        ),
        ("update runs set workload_digest = 'old'", "workload 'ranking' as it is now has answered nothing yet"),
        (
            "update rankings set score = 1 - score",
            "larger probabilities are not right more often; calibration cannot",
        ),
        ("update gold set label = 'maybe' where doc_id = 'd0'", "'maybe' is not one of the labels 'yes', 'no'"),
        (
            "create or replace table gold as select 'q' as query_id, 'd1' as doc_id, 3 as relevance",
            "judges no column that has probabilities",
        ),
    ],
)
def test_too_little_gold_is_refused_in_a_line(database: Path, change: str, message: str) -> None:
    sql(database, change)
    with pytest.raises(DatabaseError, match=message) as caught:
        calibrate_answers.fn(str(database), RANKING, "gold", "platt")
    assert "\n" not in str(caught.value)
    assert not sql(database, "select * from information_schema.tables where table_name like 'calibrat%'")


def test_a_key_that_is_called_like_a_column_of_the_views_is_refused(database: Path) -> None:
    with pytest.raises(DatabaseError, match="workload 'ranking' has a key 'Label', which is also a column"):
        calibrate_answers.fn(str(database), replace(RANKING, key=("query_id", "Label")), "gold", "platt")


def test_a_users_own_view_is_not_replaced(database: Path) -> None:
    sql(database, "create view calibrated_rankings as select 1 as mine")
    message = "team.duckdb: batchloom has not made the view 'calibrated_rankings' and would replace it: rename it"
    with pytest.raises(DatabaseError, match=message):
        calibrate_answers.fn(str(database), RANKING, "gold", "platt")
    assert sql(database, "from calibrated_rankings") == [(1,)]
