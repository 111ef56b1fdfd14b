"""Several typed questions a row: asked once each, answered whole, against the engine asked one prompt at a time."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ArtifactError, DatabaseError, WorkloadError
from engine.request import Request
from tasks.answers import decide
from tasks.answers.decide import Question
from tasks.explain import read_all_rows
from tasks.partitions import attempt
from tasks.partitions.attempt import infer_partition
from tasks.plan_prefix import write_plan
from tasks.prompts.text_codec import TextCodec
from tasks.read import read
from tasks.runs.failure_rate import count_invalid
from tasks.runs.infer_job import FailurePolicy, InferJob
from tasks.runs.run import Run
from tasks.runs.run_summary import RunSummary
from tasks.storage.plan_file import read_plan_summary
from tasks.tokenize import write_tokens
from tasks.workloads.workload import Workload, load_workload
from tasks.write import write_run
from tests.sources import make_job, make_source

QUESTIONS = {
    "urgent": """{ type = "BOOLEAN", ask = "Is it urgent?" }""",
    "topic": """{ type = "ENUM('bill', 'parcel', 'it''s {other}')", ask = "What is it about?" }""",
    "tone": """{ type = "SCORE(-1, 2)", ask = "How friendly is it?" }""",
}
TEMPLATE = "A customer writes: {message}"
NUM_ROWS = 12


class Nights:
    """Nights over one database, in this process and without a server."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.database = folder / "team.duckdb"
        self.num_asked: list[int] = []
        self.plans: list[Any] = []

    def sql(self, query: str) -> list[tuple[Any, ...]]:
        with duckdb.connect(str(self.database)) as connection:
            return connection.execute(query).fetchall()

    def load(self, questions: dict[str, str], **changes: str) -> Workload:
        text = (
            'name = "triage"\nmode = "decide"\nrequests_sql = "tickets.sql"\nkey = ["ticket_id"]\n'
            f"[prompt]\nchat = false\ntemplate = '''{TEMPLATE}'''\n[output]\ntable = \"triage\"\n[questions]\n"
            + "".join(f"{name} = {question}\n" for name, question in questions.items())
        )
        for old, new in changes.items():
            text = text.replace(old, new)
        (self.folder / "tickets.sql").write_text("select ticket_id, message from tickets")
        (self.folder / "triage.toml").write_text(text)
        return load_workload(self.folder / "triage.toml")

    def begin(self, workload: Workload, *, full: bool = False, max_model_len: int = 192) -> tuple[Run, InferJob | None]:
        source = make_source(self.database, "model-1", model=str(self.model), full=full)
        run = Run.begin(source, workload, {})
        found = read.fn(source, workload, run.folder)
        run.note({"requests": found.requests}, num_already_done=found.num_already_done)
        if not found.num_selected:
            self.num_asked.append(0)
            return run, None
        folder = Path(run.folder)
        tokens = write_tokens(found.requests, folder / "tokens.parquet", workload, self.model, max_model_len)
        plan = write_plan(tokens, folder / "plan.parquet", "exact", 100_000, 1)
        run.note({"tokens": tokens, "plan": plan})
        self.num_asked.append(read_plan_summary(plan).num_rows)
        self.plans.append(read_all_rows(plan) if self.num_asked[-1] else None)
        engine = EngineConfig(device="cpu", dtype="float32", kv_memory_bytes=8 << 20, block_size=8)
        failures = FailurePolicy(retries=0, retry_delay_seconds=0, max_error_rate=1.0)
        given = {"plan": plan, "engine": engine, "failures": failures}
        return run, make_job(run.folder, workload, self.model, **given)

    def run(self, workload: Workload, **options: Any) -> RunSummary:
        run, job = self.begin(workload, **options)
        if job is not None:
            for partition in range(read_plan_summary(job.plan).num_partitions):
                infer_partition(partition, job)
        run.end("completed")
        return write_run(run, workload)

    def answers(self, columns: str = "*") -> list[tuple[Any, ...]]:
        return self.sql(f"select {columns} from latest_triage order by ticket_id")


@pytest.fixture
def nights(tmp_path: Path, tiny_llama: Path) -> Nights:
    nights = Nights(tmp_path, tiny_llama)
    nights.sql(
        "create table tickets as select 't' || lpad(i::text, 2, '0') as ticket_id,"
        f" 'ticket ' || chr((65 + i)::int) || ' says that the parcel is late <|im_end|>' as message"
        f" from range({NUM_ROWS}) as t (i)"
    )
    return nights


@pytest.fixture
def expect(tiny_llama: Path) -> Callable[[str, str, tuple[str, ...]], list[float]]:
    """Probabilities of labels after a whole prompt, asked alone."""
    codec = TextCodec.load(tiny_llama)
    engine = Engine.load(tiny_llama, EngineConfig(device="cpu", dtype="float32", kv_memory_bytes=8 << 20))

    def ask(message: str, suffix: str, labels: tuple[str, ...]) -> list[float]:
        (token_ids,) = codec.encode([f"A customer writes: {message}{suffix}"], add_special_tokens=True)
        request = Request(
            request_id="one", token_ids=token_ids, mode="score", labels=tuple(codec.encode_labels(labels, suffix))
        )
        (completion,) = engine.score([request])
        return [math.exp(logprob) for logprob in completion.label_logprobs]

    return ask


def suffix_of(ask: str, labels: tuple[str, ...]) -> str:
    return f"\n\n{ask}\nAnswer with one of: {', '.join(labels)}."


def test_every_question_is_answered_as_if_it_were_alone(nights: Nights, expect: Any) -> None:
    summary = nights.run(nights.load(QUESTIONS))
    assert (summary.num_rows, summary.num_ok, summary.num_errors) == (NUM_ROWS, NUM_ROWS, 0)
    assert nights.num_asked == [NUM_ROWS * 3]
    messages = dict(nights.sql("select ticket_id, message from tickets"))
    rows = nights.answers("ticket_id, urgent, urgent_probability, topic, topic_probabilities, tone")
    assert [row[0] for row in rows] == sorted(messages)
    topics, tones = ("bill", "parcel", "it's {other}"), ("-1", "0", "1", "2")
    for ticket, urgent, probability, topic, probabilities, tone in rows:
        yes, no = expect(messages[ticket], suffix_of("Is it urgent?", ("yes", "no")), ("yes", "no"))
        assert probability == pytest.approx(yes, rel=1e-5)
        assert urgent == (yes >= no)
        expected = expect(messages[ticket], suffix_of("What is it about?", topics), topics)
        assert probabilities == pytest.approx(dict(zip(topics, expected, strict=True)), rel=1e-5)
        assert topic == topics[expected.index(max(expected))]
        expected = expect(messages[ticket], suffix_of("How friendly is it?", tones), tones)
        assert tone == pytest.approx(sum(int(k) * p for k, p in zip(tones, expected, strict=True)), rel=1e-5, abs=1e-6)
    types = dict(nights.sql("select column_name, column_type from (describe triage)"))
    assert [types[name] for name in ("urgent", "urgent_probability", "topic", "topic_probabilities", "tone")] == [
        "BOOLEAN", "DOUBLE", "VARCHAR", "MAP(VARCHAR, DOUBLE)", "DOUBLE"
    ]  # fmt: skip


def test_words_in_braces_are_replaced_in_the_template_alone(nights: Nights) -> None:
    question = """{ type = "ENUM('{question}', '{options}')", ask = "{options} or {question}?" }"""
    kind = nights.load({"which": question}).kind
    assert kind.suffixes == (suffix_of("{options} or {question}?", ("{question}", "{options}")),)


def test_a_rows_text_is_computed_once_for_all_its_questions(nights: Nights) -> None:
    summary = nights.run(nights.load(QUESTIONS))
    plan = nights.plans[0]
    groups = {row: set(plan.group_id[plan.row_id // 3 == row].tolist()) for row in range(NUM_ROWS)}
    assert all(len(group) == 1 for group in groups.values()), "the questions of a row are one prefix group"
    assert len(set.union(*groups.values())) == NUM_ROWS
    codec = TextCodec.load(nights.model)
    messages = [f"A customer writes: {message}" for (message,) in nights.sql("select message from tickets")]
    lengths = map(len, codec.encode(messages, add_special_tokens=True))
    assert summary.num_cached_tokens >= 2 * sum(length - 2 for length in lengths)


def test_all_questions_are_asked_again_where_a_content_of_the_key_is_gone(nights: Nights) -> None:
    nights.sql("insert into tickets values ('t00', 'other text')")
    nights.run(nights.load(QUESTIONS))
    nights.run(nights.load(QUESTIONS))
    nights.sql("delete from tickets where message = 'other text'")
    nights.run(nights.load(QUESTIONS))
    assert nights.num_asked == [len(QUESTIONS) * (NUM_ROWS + 1), 0, len(QUESTIONS)]


def test_a_question_that_is_added_is_asked_alone(nights: Nights) -> None:
    two = {name: QUESTIONS[name] for name in ("urgent", "topic")}
    nights.run(nights.load(two))
    before = nights.answers("urgent, urgent_probability, topic, topic_probabilities")
    assert nights.run(nights.load(two)).num_rows == 0
    found = read.fn(make_source(nights.database, "model-1"), nights.load(QUESTIONS), nights.folder)
    assert found.reasons == {"with questions not answered yet": NUM_ROWS}
    summary = nights.run(nights.load(QUESTIONS))
    assert nights.num_asked == [2 * NUM_ROWS, 0, NUM_ROWS]
    assert (summary.num_rows, summary.num_ok, summary.num_already_done) == (NUM_ROWS, NUM_ROWS, 0)
    assert nights.answers("urgent, urgent_probability, topic, topic_probabilities") == before, "kept, not asked again"
    assert nights.answers("tone is null") == [(False,)] * NUM_ROWS
    assert nights.sql("select count(*), count(distinct run_id) from triage") == [(2 * NUM_ROWS, 2)]
    assert nights.run(nights.load(QUESTIONS)).num_rows == 0
    nights.sql("insert into tickets values ('t99', 'a new one')")
    assert nights.run(nights.load(QUESTIONS)).num_ok == 1
    assert nights.num_asked[-1] == 3
    everything = nights.run(nights.load(QUESTIONS), full=True)
    assert (everything.num_ok, nights.num_asked[-1]) == (NUM_ROWS + 1, 3 * (NUM_ROWS + 1))


@pytest.mark.parametrize("table", ["answers", "asked", "kept", "requests", "asked_questions"])
def test_answers_are_kept_in_a_table_of_any_name(nights: Nights, table: str) -> None:
    other = {'table = "triage"': f'table = "{table}"'}
    nights.run(nights.load({"urgent": QUESTIONS["urgent"]}, **other))
    before = nights.sql(f"select ticket_id, urgent_probability from latest_{table} order by all")
    nights.run(nights.load({name: QUESTIONS[name] for name in ("urgent", "tone")}, **other))
    assert nights.num_asked == [NUM_ROWS, NUM_ROWS]
    assert nights.sql(f"select ticket_id, urgent_probability from latest_{table} order by all") == before


@pytest.mark.parametrize("name", ["Number", "each", "states", "answers", "kept", "judged", "new_states", "name"])
def test_a_question_may_have_any_name(nights: Nights, name: str) -> None:
    nights.run(nights.load({name: QUESTIONS["urgent"]}))
    nights.run(nights.load({name: QUESTIONS["urgent"], "tone": QUESTIONS["tone"]}))
    assert nights.num_asked == [NUM_ROWS, NUM_ROWS]
    found = nights.answers(f"{name} = ({name}_probability >= 0.5), tone is null, status")
    assert found == [(True, False, "ok")] * NUM_ROWS


def test_a_question_that_is_changed_or_left_out(nights: Nights) -> None:
    nights.run(nights.load(QUESTIONS))
    before = nights.answers("topic_probabilities, tone")
    changed = QUESTIONS | {"urgent": """{ type = "BOOLEAN", ask = "Must it be answered today?" }"""}
    old = nights.answers("urgent_probability")
    nights.run(nights.load(changed))
    assert nights.num_asked[-1] == NUM_ROWS
    assert nights.answers("urgent_probability") != old
    assert nights.answers("topic_probabilities, tone") == before
    fewer = {name: changed[name] for name in ("urgent", "tone")}
    assert nights.run(nights.load(fewer)).num_rows == 0, "nothing is open"
    assert nights.run(nights.load(changed, writes="wrote")).num_ok == NUM_ROWS, "another prompt asks all again"
    assert nights.num_asked[-1] == 3 * NUM_ROWS
    other = changed | {"tone": """{ type = "BOOLEAN", ask = "How friendly is it?" }"""}
    with pytest.raises(
        DatabaseError,
        match="column 'tone' is DOUBLE, batchloom writes BOOLEAN: alter its type, or name another column or table",
    ):
        nights.run(nights.load(other))


def test_a_table_of_another_mode_is_refused(nights: Nights) -> None:
    workload = nights.load(QUESTIONS)
    nights.run(workload)
    nights.sql("alter table triage drop column question_states")
    with pytest.raises(DatabaseError, match=r"table 'triage' has no column 'question_states'; .*: add it"):
        nights.run(workload)


def test_rows_that_cannot_be_asked(nights: Nights) -> None:
    long = "late " * 120
    nights.sql(f"update tickets set message = case ticket_id when 't01' then null else '{long}' end "
               "where ticket_id in ('t01', 't02')")  # fmt: skip
    summary = nights.run(nights.load(QUESTIONS))
    assert (summary.num_ok, summary.num_errors) == (NUM_ROWS - 2, 2)
    errors = nights.sql("select ticket_id, finish_reason, error from failed_triage order by ticket_id")
    assert errors[0] == ("t01", "invalid", "message is NULL")
    assert errors[1][:2] == ("t02", "invalid")
    assert errors[1][2].startswith("urgent: the prompt has ")
    assert errors[1][2].count("; ") == 2, "each question says why"
    assert nights.run(nights.load(QUESTIONS)).num_rows == 0, "not tried again as they are"


def test_a_question_that_alone_is_too_long_is_an_error_of_its_row(nights: Nights) -> None:
    talkative = QUESTIONS | {"why": f"""{{ type = "BOOLEAN", ask = "{"really " * 60}?" }}"""}
    two = nights.run(nights.load(QUESTIONS))
    summary = nights.run(nights.load(talkative), max_model_len=128)
    assert (two.num_ok, summary.num_ok, summary.num_errors) == (NUM_ROWS, 0, NUM_ROWS)
    ((error, finish_reason, urgent, why),) = set(
        nights.answers("regexp_replace(error, '[0-9]+', '#', 'g'), finish_reason, urgent is null, why is null")
    )
    assert error.startswith("why: the prompt has # tokens, the limit is #")
    assert (finish_reason, urgent, why) == ("invalid", False, True), "the other answers stay"
    tokens = nights.begin(nights.load(talkative), full=True, max_model_len=128)[0].artifacts["tokens"]
    assert count_invalid(nights.load(talkative), tokens).total() == NUM_ROWS < tokens.num_rows, "rows, not questions"
    assert nights.run(nights.load(talkative), max_model_len=128).num_rows == 0


def test_a_question_that_fails_in_the_engine_is_asked_again(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    run_model = attempt.run_model

    def fail_some(rows: Any, job: Any, model: Any, on_step: Any) -> Any:
        if 3 * 4 + 1 in rows.row_id.tolist():
            raise RuntimeError("a bad tile")
        yield from run_model(rows, job, model, on_step)

    monkeypatch.setattr(attempt, "run_model", fail_some)
    monkeypatch.setattr("tasks.partitions.failing.check_other_rows", lambda job: None)
    summary = nights.run(nights.load(QUESTIONS))
    assert (summary.num_ok, summary.num_errors) == (NUM_ROWS - 1, 1)
    ((ticket, error, finish_reason, urgent, topic),) = nights.sql(
        "select ticket_id, error, finish_reason, urgent is null, topic from latest_triage where status = 'error'"
    )
    assert (ticket, error) == ("t04", "topic: RuntimeError: a bad tile")
    assert (finish_reason, urgent, topic) == ("error", False, None)
    monkeypatch.undo()
    again = nights.run(nights.load(QUESTIONS))
    assert (again.num_rows, again.num_ok, nights.num_asked[-1]) == (1, 1, 1), "that question alone"
    assert nights.answers("status, topic is null") == [("ok", False)] * NUM_ROWS


def test_a_run_that_was_stopped_keeps_whole_rows(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    run_model = attempt.run_model

    def stop_early(*arguments: Any) -> Any:
        for number, completion in enumerate(run_model(*arguments)):
            if number == 30:
                raise attempt.StoppedError
            yield completion

    monkeypatch.setattr(attempt, "run_model", stop_early)
    summary = nights.run(nights.load(QUESTIONS))
    monkeypatch.undo()
    assert 0 < summary.num_ok < NUM_ROWS
    assert summary.num_unanswered == NUM_ROWS - summary.num_ok
    rest = nights.run(nights.load(QUESTIONS))
    assert rest.num_ok == NUM_ROWS - summary.num_ok
    assert nights.answers("status") == [("ok",)] * NUM_ROWS


def test_written_twice_is_written_once(nights: Nights) -> None:
    run, job = nights.begin(nights.load(QUESTIONS))
    assert job is not None
    for partition in range(read_plan_summary(job.plan).num_partitions):
        infer_partition(partition, job)
    first, second = write_run(run, job.first.workload), write_run(run, job.first.workload)
    assert (first.num_ok, second.num_ok) == (NUM_ROWS, NUM_ROWS)
    assert nights.sql("select count(*) from triage") == [(NUM_ROWS,)]
    other = nights.load(QUESTIONS | {"why": """{ type = "BOOLEAN", ask = "Why?" }"""})
    with pytest.raises(ArtifactError, match="were changed since run"):
        write_run(run, other)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (
            """{ type = "ENUM()", ask = "?" }""",
            "type must be BOOLEAN, ENUM('a', 'b', ...) or SCORE(1, 5); 'ENUM()' is not a type of DuckDB: ENUM type",
        ),
        ("""{ type = "ENUM('a')", ask = "?" }""", "must have from 2 to 100 labels, none of them empty, got"),
        ("""{ type = "ENUM('a', ' ')", ask = "?" }""", "must have from 2 to 100 labels, none of them empty, got"),
        ("""{ type = "ENUM('a', 'a')", ask = "?" }""", "duplicate value a"),
        ("""{ type = "BOOLEAN DEFAULT 3", ask = "?" }""", "'BOOLEAN DEFAULT 3' is not a type of DuckDB"),
        ("""{ type = "BOOLEAN NOT NULL", ask = "?" }""", "'BOOLEAN NOT NULL' is not a type of DuckDB"),
        ("""{ type = "INTEGER", ask = "?" }""", "must be BOOLEAN, ENUM('a', 'b', ...) or SCORE(1, 5), got 'INTEGER'"),
        ("""{ type = "SCORE(5, 1)", ask = "?" }""", "must have from 2 to 100 scores, got 'SCORE(5, 1)'"),
        ("""{ type = "SCORE(0, 100)", ask = "?" }""", "must have from 2 to 100 scores, got 'SCORE(0, 100)'"),
        ("""{ type = "BOOLEAN" }""", "[questions]: [bad]: ask is missing; expected a string"),
        ("""{ type = "BOOLEAN", ask = " " }""", "[questions]: [bad]: ask must not be empty"),
        ("""{ type = "BOOLEAN", ask = "?", labels = [] }""", "'labels' is not a known key here"),
        ("3", "[questions]: bad must be a table, got 3"),
    ],
)
def test_a_bad_question_is_named(nights: Nights, question: str, message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        nights.load(QUESTIONS | {"bad": question})
    assert message in str(error.value)
    assert str(error.value).startswith(str(nights.folder / "triage.toml"))


@pytest.mark.parametrize(
    ("questions", "changes", "message"),
    [
        ({}, {}, "[questions]: must hold at least one question"),
        ({}, {"[questions]\n": ""}, "questions is missing; expected a table"),
        ({'""': QUESTIONS["tone"]}, {}, "[questions]: must have printable names of at most 128 characters, got ''"),
        ({r'"a\nb"': QUESTIONS["tone"]}, {}, r"of at most 128 characters, got 'a\nb'"),
        (QUESTIONS | {"Tone": QUESTIONS["tone"]}, {}, "[questions]: give the column 'tone' twice"),
        (QUESTIONS | {"urgent_probability": QUESTIONS["tone"]}, {}, "give the column 'urgent_probability' twice"),
        (QUESTIONS | {"status": QUESTIONS["tone"]}, {}, "[questions]: may not give the column 'status'"),
        (QUESTIONS | {"ticket_id": QUESTIONS["tone"]}, {}, "key and the answer columns must all differ"),
        (QUESTIONS, {"[output]": "labels = ['a', 'b']\n[output]"}, "'labels' is not a known key here"),
        (QUESTIONS, {'mode = "decide"': 'mode = "decide"\nlabels = ["a", "b"]'}, "labels belong to mode 'score'"),
        (QUESTIONS, {'mode = "d': 'question_template = "Q"\nmode = "d'}, "question_template must hold {question}"),
    ],
)  # fmt: skip
def test_bad_questions_are_named(
    nights: Nights, questions: dict[str, str], changes: dict[str, str], message: str
) -> None:
    with pytest.raises(WorkloadError) as error:
        nights.load(questions, **changes)
    assert message in str(error.value)


def test_the_shipped_questions_about_documents(nights: Nights) -> None:
    nights.sql(
        "create table documents as from (values ('d1', 'The with statement', 'It is used to wrap a block.'),"
        " ('d2', null, 'Lists hold items.'), ('d3', 'Empty', ''), ('d4', 'One', 'a'), ('d4', 'Two', 'b'))"
        " as documents (doc_id, title, body)"
    )
    summary = nights.run(load_workload("facets"))
    assert (summary.num_rows, summary.num_ok, summary.num_errors) == (5, 2, 3)
    rows = nights.sql(
        "select has_example is null, subject in ('statement', 'expression', 'type', 'other'),"
        " difficulty between 1 and 5"
        " from latest_document_facets where status = 'ok'"
    )
    assert rows == [(False, True, True)] * 2
    errors = nights.sql("select doc_id, error from failed_document_facets order by doc_id")
    assert errors == [("d3", "body is empty"), ("d4", "doc_id 'd4' has 2 rows in documents")]


def test_a_questions_type_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """DuckDB takes longer to parse it than the rest of an answer to be read."""
    question = Question(type="ENUM('good', 'bad')", ask="Which mood?")
    monkeypatch.setattr(decide, "parse_type", None)
    assert question.read("mood", [math.log(0.75), math.log(0.25)])["mood"] == "good"
