"""`batchloom compare` on real nights: both sides' answers are those of their own nights, computed together for less."""

from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pytest

from engine.errors import ConfigError, DatabaseError, ModelError, WorkloadError
from flows.cli import batchloom
from flows.command.run_flow import run_flow
from flows.quality.compare import compare
from flows.quality.comparison_page import render_comparison
from flows.settings import EngineSettings, WorkerSettings
from tasks.answers.decide import Decisions
from tasks.answers.extract import Extraction
from tasks.answers.head_score import HeadScore
from tasks.answers.score import LabelScore
from tasks.answers.thinking import ThinkingText
from tasks.comparison import difference
from tasks.comparison.difference import Difference, PromptDiff, compare_with_gold, measure_agreement
from tasks.comparison.paired_rows import PairedRow, list_changed
from tasks.forecast.prediction import predict_run
from tasks.runs.infer_job import InferJob
from tasks.sample import AnsweredRow
from tasks.workloads.workload import load_workload
from tests.flows.conftest import ENGINE
from tests.tiny_encoders import save_encoder

pytestmark = pytest.mark.usefixtures("prefect_server")

SHIPPED = Path(__file__).parents[3] / "workloads"


def write_variant(folder: Path, shipped: str, name: str, **changes: str) -> str:
    """A shipped workload under another name, with its own table and changed texts; returns its path."""
    text = (SHIPPED / f"{shipped}.toml").read_text()
    table = {"snippets": "snippets", "ranking": "rankings"}[shipped]
    changes = {f'name = "{shipped}"': f'name = "{name}"', f'table = "{table}"': f'table = "{name}"', **changes}
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    path = folder / f"{name}.toml"
    path.write_text(text)
    return str(path)


def run_compare(nights: Any, first: str, second: str, **options: Any) -> Any:
    options = {"engine": ENGINE} | options
    return compare(database=nights.path, model=str(nights.model), workloads=(first, second), **options)


def test_both_sides_answer_as_their_own_nights_would(
    nights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = write_variant(tmp_path, "snippets", "old", **{"max_new_tokens = 48": "max_new_tokens = 8"})
    new = write_variant(
        tmp_path, "snippets", "new", **{"max_new_tokens = 48": "max_new_tokens = 12", "Question:": "Asked:"}
    )
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    simulated, predict = list[InferJob](), predict_run.fn

    def note(job: InferJob, *given: Any, **how: Any) -> Any:
        simulated.append(job)
        return predict(job, *given, **how)

    monkeypatch.setattr(predict_run, "fn", note)
    found = run_compare(nights, old, new, sample=9, engine=ENGINE.model_copy(update={"keep_prefixes": "1GB"}))
    assert list(here.iterdir()) == [], "no KV is kept"
    assert len(found.rows) == 9
    assert not nights.sql("select table_name from information_schema.tables where table_name in ('old', 'new')")
    assert not nights.sql("select * from runs")
    assert found.num_tokens_together < 0.9 * found.num_tokens_apart, "documents are computed once for both"
    assert found.forecast is not None
    assert (found.forecast.num_rows, found.forecast.answer_tokens.value > 0) == (12, True)
    lengths = [round(sum(row[side].num_output_tokens for row in found.rows) / 9) for side in (0, 1)]
    assert [member.expected_output_tokens for member in simulated[0].members] == lengths, "each side's own mean"

    nights.run(old, new)
    expected = {
        name: {(doc, query): text for doc, query, text in nights.sql(f"select doc_id, query_id, snippet from {name}")}
        for name in ("old", "new")
    }
    for row in found.rows:
        key = (row.second.key["doc_id"], row.second.key["query_id"])
        assert [side.error for side in row] == [None, None]
        assert [side.answer["snippet"] for side in row] == [expected["old"][key], expected["new"][key]]
        assert (row in found.changed) == (expected["old"][key] != expected["new"][key])
    page = render_comparison(found, 140)
    assert f"old against new: {len(found.changed)} of 9 rows have another answer" in page
    assert "Answering all rows by new:" in page


def test_two_models_answer_one_after_the_other(
    nights: Any, tmp_path: Path, tiny_checkpoint: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each side has the answers of its own model's night; the forecast is for the new one."""
    short = write_variant(tmp_path, "snippets", "short", **{"max_new_tokens = 48": "max_new_tokens = 8"})
    other = tiny_checkpoint("qwen3")
    found = run_compare(nights, short, short, new_model=str(other), sample=7)
    assert len(found.rows) == 7
    assert found.names == (f"short ({nights.model.name})", f"short ({other.name})")
    assert found.num_tokens_together is None
    assert found.num_tokens_apart > 0
    assert found.forecast is not None
    assert found.forecast.num_rows == 12
    expected = []
    for model in (nights.model, other):
        nights.model = model
        nights.run(short, full=True)
        answers = nights.sql("select doc_id, query_id, snippet from latest_short")
        expected.append({(doc, query): text for doc, query, text in answers})
    assert expected[0] != expected[1]
    for row in found.rows:
        key = (row.second.key["doc_id"], row.second.key["query_id"])
        assert [side.answer["snippet"] for side in row] == [texts[key] for texts in expected]
    assert f"{found.num_tokens_apart:,} prompt tokens computed\n" in render_comparison(found, 140)

    options = ["--database", str(nights.path), "--model", str(other), "--new-dtype", "bfloat16", "--sample", "3"]
    assert batchloom(["compare", short, short, *options, "--dtype", "float32", "--kv-memory", "8MiB"]) == 0
    assert f"short ({other.name}, float32) against short ({other.name}, bfloat16)" in capsys.readouterr().out


@pytest.mark.slow
def test_gold_says_which_is_better_with_a_paired_interval(
    nights: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels in another order are another question: the answers differ, and gold holds those of one side."""
    other = write_variant(tmp_path, "ranking", "other", **{'labels = ["yes", "no"]': 'labels = ["night", "house"]'})
    words = write_variant(tmp_path, "ranking", "words", **{'labels = ["yes", "no"]': 'labels = ["night", "the"]'})
    nights.run(words)
    nights.sql("create table gold as select query_id, doc_id, 'night' as label from words")
    found = run_compare(nights, words, other, gold="main.gold")
    by_metric = {(each.column_name, each.metric): each for each in found.differences}
    accuracy = by_metric["label", "accuracy"]
    for side, value in ((0, accuracy.first_value), (1, accuracy.second_value)):
        labels = [row[side].answer["label"] for row in found.rows]
        assert value == pytest.approx(sum(label == "night" for label in labels) / len(labels))
    brier = by_metric["score", "brier_score"]
    scores = [[row[side].answer["score"] for row in found.rows] for side in (0, 1)]
    means = [sum((score - 1) ** 2 for score in of_side) / len(of_side) for of_side in scores]
    assert (brier.first_value, brier.second_value) == (pytest.approx(means[0]), pytest.approx(means[1]))
    assert brier.difference == pytest.approx(means[1] - means[0])
    assert brier.low <= brier.difference <= brier.high
    assert brier.num_rows == 6
    assert nights.sql("select count(*) from runs") == [(1,)]

    same = run_compare(nights, words, words, gold="gold")
    assert same.changed == ()
    assert same.names == ("words (old)", "words (new)")
    assert {(each.difference, each.low, each.high) for each in same.differences} == {(0.0, None, None)}
    capitals = {'key = ["query_id", "doc_id"]': 'key = ["Query_ID", "DOC_ID"]', '"query_id"\n': '"Query_ID"\n'}
    named = write_variant(tmp_path, "ranking", "named", **{'"yes", "no"': '"night", "the"', **capitals})
    assert [row.second.key for row in run_compare(nights, named, words).rows] == [row.second.key for row in same.rows]

    with pytest.raises(WorkloadError, match=r"answer different rows: their keys are \['query_id', 'doc_id'\] and"):
        run_compare(nights, "ranking", "snippets")
    with pytest.raises(WorkloadError, match="'embeddings' gives embeddings, which cannot be compared"):
        run_compare(nights, "embeddings", "embeddings")
    options = ["--dtype", "float32", "--kv-memory", "8MiB", "--gold", "gold", "--sample", "4"]
    assert batchloom(["compare", words, other, *nights.inputs, *options]) == 0
    printed = capsys.readouterr().out
    assert "words against other:" in printed
    assert "Against gold" in printed
    assert run_flow(compare, ["--workload", words, *nights.inputs]) == 2


def test_gold_that_cannot_be_used_is_refused_before_a_row_is_read(nights: Any) -> None:
    nights.sql(
        "drop table ranking_candidates; create table wrong as select 'q0' as query_id, 'd0' as doc_id, 1 as size;"
        "create table twice as select 'q0' as query_id, 'd0' as doc_id, 'yes' as label from range(2);"
        "create table graded as select 'q0' as query_id, 'd0' as doc_id, 3 as relevance;"
        "create table empty as from twice limit 0; create table nothing as select * replace (null as label) from twice"
        " limit 1; create table other as select * replace ('maybe' as label) from twice limit 1"
    )
    for gold, message in (
        ("none", "gold 'none': no table or view 'none'"),
        ("twice", "gold table 'twice' has 2 rows with query_id 'q0', doc_id 'd0'; one is expected"),
        ("empty", "gold table 'empty' is empty"),
        ("nothing", "gold table 'nothing' judges nothing: each value of 'label' is NULL"),
        ("other", "'maybe' is not one of the labels 'yes', 'no'"),
        ("graded", "gold table 'graded' has no column to compare; the answers have score, label"),
        ("main.wrong", r"gold table 'main\.wrong' has a column 'size', which workload 'ranking' does not answer"),
    ):
        with pytest.raises(DatabaseError, match=message):
            run_compare(nights, "ranking", "ranking", gold=gold)


def test_the_sample_is_drawn_from_rows_that_gold_judges(nights: Any) -> None:
    nights.sql(
        "create table gold as select query_id, doc_id, 'yes' as label from ranking_candidates order by all limit 2"
    )
    found = run_compare(nights, "ranking", "ranking", gold="gold", sample=1)
    key = found.rows[0].second.key
    assert nights.sql("from gold where query_id = ? and doc_id = ?", [key["query_id"], key["doc_id"]])
    assert {each.num_rows for each in found.differences if each.metric == "accuracy"} == {1}
    nights.sql("update gold set query_id = 'none'")
    with pytest.raises(DatabaseError, match="no row of gold table 'gold' can be answered by workload 'ranking'"):
        run_compare(nights, "ranking", "ranking", gold="gold", sample=1)


def test_a_model_that_writes_no_text_is_refused_before_a_row_is_read(
    nights: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nights.model = save_encoder("bert", tmp_path / "encoder")
    with pytest.raises(ModelError, match="mode 'score' needs a model that writes text"):
        run_compare(nights, "ranking", "ranking")
    assert "rows to answer" not in caplog.text


def test_a_gpu_that_is_not_there_is_named_before_a_model_is_fetched(nights: Any) -> None:
    with pytest.raises(ConfigError, match="device 'cuda:99': torch finds"):
        compare(nights.path, "org/not-here", ("ranking", "ranking"), engine=EngineSettings(device="cuda:99"))


def test_an_exchange_is_refused_before_a_row_is_read(nights: Any, tmp_path: Path) -> None:
    machines = WorkerSettings(workers=1, exchange=(tmp_path / "store").as_uri())
    with pytest.raises(ConfigError, match="leave exchange empty"):
        run_compare(nights, "ranking", "ranking", machines=machines)
    assert not (tmp_path / "store").exists()


DECIDE = """
name = "{name}"
mode = "decide"
requests_sql = "select_facet_requests.sql"
key = ["doc_id"]
[prompt]
template = "Read this: {{body}}"
[questions]
{questions}
[output]
table = "{name}"
"""
TALL = 'tall = { type = "BOOLEAN", ask = "Is it tall?" }'
KIND = """kind = { type = "ENUM('tower', 'house')", ask = "What is it?" }"""
SIZE = 'size = { type = "SCORE(1, 5)", ask = "How large is it?" }'


def test_questions_are_compared_one_by_one(nights: Any, tmp_path: Path) -> None:
    sides = {"one": (TALL, KIND, SIZE), "two": (SIZE.replace("How large", "How very large"), TALL)}
    for name, questions in sides.items():
        (tmp_path / f"{name}.toml").write_text(DECIDE.format(name=name, questions="\n".join(questions)))
    one, two = (str(tmp_path / f"{name}.toml") for name in sides)
    nights.run(one, two)
    nights.sql("create table gold as select doc_id, tall, size from one")
    found = run_compare(nights, one, two, gold="gold", sample=3)
    assert len(found.rows) == 3
    assert found.num_tokens_together < 0.7 * found.num_tokens_apart, "a document is computed once for five questions"
    for side, name in enumerate(sides):
        for row in found.rows:
            assert row[side].error is None
            columns = [*row[side].answer]
            assert ("kind_probabilities" in columns) == (name == "one")
            where = [row.second.key["doc_id"]]
            night = nights.sql(f"select {', '.join(columns)} from {name} where doc_id = ?", where)[0]
            for column, value, expected in zip(columns, row[side].answer.values(), night, strict=True):
                value = dict(value) if column.endswith("_probabilities") else value
                # A small probability is as exact as the float32 logits that it is made of.
                is_text = isinstance(expected, str)
                assert value == (expected if is_text else pytest.approx(expected, rel=1e-6, abs=1e-9)), column
    agreements = {(each.column_name, each.metric): each for each in found.agreements if each.label is None}
    assert {column for column, _ in agreements} == {"tall", "size"}
    same = [row.first.answer["tall"] == row.second.answer["tall"] for row in found.rows]
    assert agreements["tall", "agreement"].value == pytest.approx(sum(same) / 3) == 1
    assert agreements["tall", "agreement"].low < 1
    apart = [abs(row.first.answer["size"] - row.second.answer["size"]) for row in found.rows]
    assert agreements["size", "mean_absolute_error"].value == pytest.approx(sum(apart) / 3)
    differences = {(each.column_name, each.metric): each for each in found.differences}
    assert differences["tall", "accuracy"].difference == 0
    assert differences["tall", "accuracy"].low is differences["tall", "accuracy"].high is None, "three rows"
    assert differences["size", "mean_absolute_error"].difference == pytest.approx(sum(apart) / 3)
    assert "Where both agree" in render_comparison(found, 140)

    mixed = run_compare(nights, one, str(_write_extraction(tmp_path)), sample=2)
    assert [sorted(row.second.answer) for row in mixed.rows] == [["tall"], ["tall"]]
    assert [each.column_name for each in mixed.agreements if each.metric == "agreement"] == ["tall"]


def _write_extraction(folder: Path) -> Path:
    path = folder / "three.toml"
    text = DECIDE.format(name="three", questions='tall = { type = "BOOLEAN", not_null = true }')
    path.write_text(text.replace('"decide"', '"extract"').replace("[questions]", "[columns]"))
    return path


def test_columns_are_ignored_by_what_they_are_not_by_their_names() -> None:
    columns = dict.fromkeys(("score", "tall", "tall_probability", "thinking"), "DOUBLE")
    extracted = Extraction(columns=columns, output={"table": "t"})
    decided = Decisions(questions={"tall": {"type": "BOOLEAN", "ask": "?"}}, output={"table": "t"})
    scored = LabelScore(labels=("a", "b"), output={"table": "t"})
    thought = ThinkingText(
        thinking="keep", max_thinking_tokens=9, decoding={}, output={"table": "t", "answer_column": "score"}
    )
    for kind, counted, ignored in (
        (extracted, ("score", "tall", "tall_probability", "thinking"), ()),
        (decided, ("tall",), ("tall_probability",)),
        (scored, ("label",), ("score", "label_logprobs")),
        (HeadScore(labels=("a",), score_label="a", output={"table": "t"}), ("score",), ("label", "label_logprobs")),
        (thought, ("score",), ("thinking",)),
    ):
        for name in (*counted, *ignored):
            rows = [AnsweredRow(key={}, answer={name: value}, error=None, num_prompt_tokens=9, num_output_tokens=1)
                    for value in (0.25, 0.5)]  # fmt: skip
            changed = [PairedRow(*rows)] if name in counted else []
            assert list_changed([PairedRow(*rows)], (kind, kind)) == changed, (kind.mode, name)


@pytest.mark.parametrize("column", ["snippet", "Snippet"])
def test_the_text_of_two_modes_is_compared(tmp_path: Path, column: str) -> None:
    """Mode "generate" has a column of type text, mode "extract" one of type VARCHAR; names have no case."""
    text = _write_extraction(tmp_path).read_text().replace("tall = ", f"{column} = ").replace("BOOLEAN", "VARCHAR")
    (tmp_path / "texts.toml").write_text(text.replace('["doc_id"]', '["doc_id", "query_id"]'))
    workloads = (load_workload("snippets"), load_workload(tmp_path / "texts.toml"))
    key = {"doc_id": "d", "query_id": "q"}
    row = PairedRow(*(
        AnsweredRow(key=key, answer={name: text}, error=None, num_prompt_tokens=9, num_output_tokens=1)
        for name, text in (("snippet", "late at night"), (column, "at night"))
    ))  # fmt: skip
    found = {each.metric: each.value for each in measure_agreement(workloads, [row])}
    assert found == {"agreement": 0, "token_f1": pytest.approx(4 / 5)}
    same = PairedRow(row.first, replace(row.second, answer={column: "late at night"}))
    assert list_changed([row, same], (workloads[0].kind, workloads[1].kind)) == [row]
    with duckdb.connect(str(tmp_path / "team.duckdb")) as connection:
        connection.execute("create table gold as select 'd' as doc_id, 'q' as query_id, 'at night' as snippet")
    against_gold = compare_with_gold(tmp_path / "team.duckdb", "gold", workloads, [row])
    assert [each.difference for each in against_gold if each.metric == "exact_match"] == [1]


@pytest.mark.parametrize(
    ("old", "new", "values", "metrics"),
    [
        (
            "ENUM('a', 'it''s')",
            "ENUM('a', 'b', 'it''s')",
            [("a", "a"), ("it's", "b")],
            {"agreement": 0.5, "kappa": 1 / 3},
        ),
        ("DECIMAL(12,2)", "INTEGER", [(Decimal("2.00"), 2), (Decimal("2.50"), 3)], {"agreement": 0.5}),
        ("DATE", "VARCHAR", [(date(2026, 1, 1), "2026-01-01")], {}),
    ],
)
def test_columns_of_other_types_are_compared_where_values_can_be_equal(
    tmp_path: Path, old: str, new: str, values: Any, metrics: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as by one label more, which is what two prompts are often compared for."""
    kinds = [Extraction(columns={"topic": type_}, output={"table": "t"}) for type_ in (old, new)]
    first, second = (replace(load_workload("facts"), kind=kind) for kind in kinds)
    given = {"error": None, "num_prompt_tokens": 9, "num_output_tokens": 0}
    rows = [
        PairedRow(*(AnsweredRow(key={"doc_id": f"d{n}"}, answer={"topic": value}, **given) for value in pair))
        for n, pair in enumerate(values)
    ]
    found = {each.metric: each.value for each in measure_agreement((first, second), rows)}
    assert {name: found[name] for name in metrics} == pytest.approx(metrics)
    assert bool(found) is bool(metrics)
    expected = [] if metrics else ["topic: not compared, since DATE is no VARCHAR"]
    assert caplog.messages == expected


def test_a_question_that_only_one_workload_asks_changes_no_answer() -> None:
    """Else a new question would hide which of the old ones are answered in another way."""
    tall, old, large = ({name: {"type": "BOOLEAN", "ask": "?"}} for name in ("tall", "old", "large"))
    kinds = [Decisions(questions=asked, output={"table": "t"}) for asked in (tall, tall | old, large)]

    def pair(first: dict[str, bool], second: dict[str, bool]) -> PairedRow:
        given = {"key": {}, "error": None, "num_prompt_tokens": 9, "num_output_tokens": 0}
        return PairedRow(*(AnsweredRow(answer=answer, **given) for answer in (first, second)))

    same = pair({"tall": True}, {"tall": True, "old": True})
    other = pair({"tall": True}, {"tall": False, "old": True})
    assert list_changed([same, other], (kinds[0], kinds[1])) == [other]
    apart = pair({"tall": True}, {"large": True})
    assert list_changed([apart], (kinds[0], kinds[2])) == [apart], "they have nothing in common"


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_gold_keys_with_a_time_zone_match_in_any_zone(
    nights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    monkeypatch.setenv("TZ", zone)
    (tmp_path / "mails.sql").write_text("select sent_at, body from mails")
    for name in ("old", "new"):
        text = (SHIPPED / "snippets.toml").read_text().replace('["doc_id", "query_id"]', '["sent_at"]')
        text = text.replace('"snippets"', f'"{name}"').replace("select_snippet_requests", "mails")
        (tmp_path / f"{name}.toml").write_text(text)
    old, new = (load_workload(tmp_path / f"{name}.toml") for name in ("old", "new"))
    nights.sql("create table gold as select timestamptz '2026-03-29 00:30+00' as sent_at, 'late' as snippet")
    key = {"sent_at": "2026-03-29 00:30:00+00"}
    row = PairedRow(*(
        AnsweredRow(key=key, answer={"snippet": text}, error=None, num_prompt_tokens=9, num_output_tokens=1)
        for text in ("soon", "late")
    ))  # fmt: skip
    found = compare_with_gold(nights.path, "gold", (old, new), [row])
    assert [each.difference for each in found if each.metric == "exact_match"] == [1]


@pytest.mark.parametrize(("num_better", "is_known"), [(0, False), (1, True), (8, False)])
def test_rows_with_the_same_difference_prove_nothing(tmp_path: Path, num_better: int, is_known: bool) -> None:
    """Of eight rows, the second workload answers so many better."""
    workload = load_workload("snippets")
    rows = [
        PairedRow(*(
            AnsweredRow(key={"doc_id": f"d{n}", "query_id": "q"}, answer={"snippet": text}, error=None,
                        num_prompt_tokens=9, num_output_tokens=1)
            for text in ("wrong" if n < num_better else "right", "right")
        ))
        for n in range(8)
    ]  # fmt: skip
    with duckdb.connect(str(tmp_path / "team.duckdb")) as connection:
        connection.execute("create table gold as select 'd' || i as doc_id, 'q' as query_id, 'right' as snippet from"
                           " range(8) as rows (i)")  # fmt: skip
    for each in compare_with_gold(tmp_path / "team.duckdb", "gold", (workload, workload), rows):
        is_equal = each.metric == "coverage" or not is_known
        assert ((each.low, each.high) == (None, None)) is is_equal, each


def test_many_rows_are_compared_with_few_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each statement costs as much as hundreds of rows; a row may lack what others have."""
    questions = {"kind": {"type": "BOOLEAN", "ask": "?"}, "topic": {"type": "ENUM('a', 'b')", "ask": "?"}}
    kind = Decisions(questions=questions, output={"table": "t"})
    workload = replace(load_workload("facets"), kind=kind)
    rows = []
    for n in range(2500):
        sides = []
        for side in (0, 1):
            topic = None if n % 5 == 1 else "b" if side and n % 5 == 0 else "a"
            chances = None if topic is None else [("a", 0.75), ("b", 0.25)]
            answer = {"kind": n % 2 == 0, "kind_probability": 0.5, "topic": topic, "topic_probabilities": chances}
            given = {"error": None, "num_prompt_tokens": 9, "num_output_tokens": 0}
            sides.append(AnsweredRow(key={"doc_id": f"d{n}"}, answer=answer, **given))
        rows.append(PairedRow(*sides))
    statements = []
    run = difference.execute
    monkeypatch.setattr(difference, "execute", lambda *given, **how: statements.append(given[1]) or run(*given, **how))
    found = {(each.column_name, each.metric): each for each in measure_agreement((workload, workload), rows)}
    assert found["kind", "agreement"].value == 1
    assert (found["topic", "agreement"].value, found["topic", "agreement"].num_rows) == (0.75, 2000)
    assert statements.count("write/insert_rows") == 6


def test_a_difference_that_rounds_to_nothing_has_no_minus() -> None:
    answered = AnsweredRow(key={"id": "1"}, answer={"label": "a"}, error=None, num_prompt_tokens=9, num_output_tokens=1)
    row = PairedRow(answered, answered)
    difference = Difference(
        column_name="score", metric="brier_score", first_value=0.2, second_value=0.1998,
        difference=-0.0002, low=-0.0004, high=-0.0001, num_rows=1,
    )  # fmt: skip
    page = render_comparison(PromptDiff(names=("old", "new"), gold="gold", rows=(row,), differences=(difference,)), 140)
    assert "+0.000 to +0.000" in page
    assert "-0.000" not in page
