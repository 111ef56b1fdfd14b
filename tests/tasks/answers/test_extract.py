"""Columns with types: files that are refused, and answers that DuckDB casts, whatever a model would like to say."""

import json
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer

from engine import Completion, Grammar
from engine.errors import WorkloadError
from tasks.answers.column_grammar import Bounds, value_grammar
from tasks.answers.duckdb_type import parse_type
from tasks.answers.extract import Extraction
from tasks.answers.text import TextAnswer
from tasks.workloads.workload import Workload, load_workload
from tests.engine.grammars import load_vocabulary

HEAD = """
name = "invoices"
mode = "extract"
requests_sql = "select_texts.sql"
key = ["text_id"]
[prompt]
template = "{body}"
system = "Read the invoice."
[output]
table = "invoices"
"""
COLUMNS = """
[columns]
vendor   = { type = "VARCHAR", max_chars = 20 }
total    = { type = "NUMERIC(12, 2)", ask = "the amount due", not_null = true }
currency = "ENUM('EUR', 'USD', 'G\\"B{P')"
due      = "DATE"
sent     = "TIMESTAMP"
is_paid  = "BOOL"
big      = "HUGEINT"
share    = "DOUBLE"
code     = { type = "VARCHAR", pattern = "[A-Z]{2}-[0-9]{1,3}" }
items    = { type = 'STRUCT("the name" VARCHAR, quantity UTINYINT, tags TEXT[])[]', max_items = 2, max_chars = 4 }
pair     = "INTEGER[2]"
"""


def save(folder: Path, text: str) -> Path:
    (folder / "select_texts.sql").write_text("select 't1' as text_id, 'a body' as body")
    path = folder / "w.toml"
    path.write_text(text)
    return path


def test_the_prompt_says_null_only_of_columns_that_may_be_null(tmp_path: Path) -> None:
    def instructions(columns: str) -> str:
        return load_workload(save(tmp_path, HEAD + f"[columns]\n{columns}")).kind.instructions

    assert "with these fields; a field is null where the text does not say:\n" in instructions('due = "DATE"\n')
    always = 'total = { type = "INTEGER", not_null = true }\n'
    assert "null" not in instructions(always)
    assert "with these fields; due is null where the text does not say:\n" in instructions(always + 'due = "DATE"\n')


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    return load_workload(save(tmp_path, HEAD + COLUMNS))


def test_columns_have_the_types_of_duckdb(workload: Workload) -> None:
    assert dict(workload.kind.columns) == {
        "vendor": "VARCHAR",
        "total": "DECIMAL(12,2)",
        "currency": "ENUM('EUR', 'USD', 'G\"B{P')",
        "due": "DATE",
        "sent": "TIMESTAMP",
        "is_paid": "BOOLEAN",
        "big": "HUGEINT",
        "share": "DOUBLE",
        "code": "VARCHAR",
        "items": 'STRUCT("the name" VARCHAR, quantity UTINYINT, tags VARCHAR[])[]',
        "pair": "INTEGER[2]",
    }
    assert workload.prompt.system.startswith("Read the invoice.\n\nAnswer with one JSON object")
    assert "\n- total (DECIMAL(12,2)): the amount due\n" in workload.prompt.system
    assert workload.kind.max_answer_tokens == 256


def test_other_keys_of_decoding_leave_the_length_of_an_answer(tmp_path: Path) -> None:
    text = HEAD.replace("[output]", "[decoding]\ntemperature = 0.5\n[output]") + COLUMNS
    assert load_workload(save(tmp_path, text)).kind.max_answer_tokens == 256
    text = HEAD.replace("[output]", "[decoding]\nmax_new_tokens = 5\n[output]") + COLUMNS
    assert load_workload(save(tmp_path, text)).kind.max_answer_tokens == 5


def test_every_key_that_decides_an_answer_is_in_the_digest(tmp_path: Path, workload: Workload) -> None:
    digests = {workload.digest}
    changes = (("max_chars = 20", "max_chars = 21"), ("{1,3}", "{1,4}"), ("the amount due", "the sum"), ("BOOL", "INT"))
    for old, new in changes:
        digests.add(load_workload(save(tmp_path, HEAD + COLUMNS.replace(old, new))).digest)
    assert len(digests) == 1 + len(changes)


def test_without_a_chat_template_the_columns_come_before_the_template(tmp_path: Path) -> None:
    text = HEAD.replace('system = "Read the invoice."', "chat = false") + "[columns]\na = 'STRUCT(\"{b}\" INTEGER)'"
    prompt = load_workload(save(tmp_path, text)).prompt
    assert prompt.fields == ("body",)
    assert prompt.template.endswith('\n- a (STRUCT("{{b}}" INTEGER))\n\n{body}')


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ('a = "nonsense"', "[columns]: [a]: type 'nonsense' is not a type of DuckDB: Type with name nonsense"),
        ('a = "ENUM()"', "ENUM type requires at least one argument"),
        ("a = \"ENUM('x', 'x')\"", "duplicate value x"),
        ('a = "MAP(INT, INT)"', "type 'MAP(INTEGER, INTEGER)' is not supported; a column may be VARCHAR, BOOLEAN"),
        ('a = "STRUCT(b JSON)"', "type 'JSON' is not supported"),
        ('a = "INT NOT NULL"', "type 'INT NOT NULL' is not a type of DuckDB"),
        ('a = "INTEGER[100000]"', "holds 100,000 values in each row, at most 4,096 fit: leave the size of"),
        ('a = "STRUCT(b INT, c STRUCT(d INT)[64])[64]"', "holds 4,160 values in each row, at most 4,096 fit: leave"),
        ('a = "INT, b INT"', "type 'INT, b INT' is not a type of DuckDB"),
        ('a = "INT); drop table texts; --"', "is not a type of DuckDB"),
        ('a = "INT"\nA = "INT"', "[columns]: A: an earlier column has this name; case does not matter"),
        ('a = "INT"\na = "INT"', "cannot be read as TOML: Cannot overwrite a value"),
        ('text_id = "INT"', "key and the answer columns must all differ"),
        ('status = "INT"', "[columns]: status: batchloom writes a column of this name itself"),
        ('" " = "INT"', "a column needs a printable name"),
        ('a = { ask = "what?" }', "[columns]: [a]: type is missing; expected a string"),
        ('a = { type = "INT", most = 3 }', "[columns]: [a]: 'most' is not a known key here"),
        ('a = { type = "INT", pattern = "x" }', "[columns]: a: pattern needs a VARCHAR in the type INTEGER"),
        ('a = { type = "INT", max_items = 3 }', "[columns]: a: max_items needs a LIST in the type INTEGER"),
        ('a = { type = "VARCHAR", max_chars = -1 }', "[columns]: [a]: max_chars must be 1 or more and below 2**31, or"),
        ('a = { type = "VARCHAR", max_chars = 0 }', "[columns]: [a]: max_chars must be 1 or more and below 2**31, or"),
        ('a = { type = "INT[]", max_items = 0 }', "[columns]: [a]: max_items must be 1 or more and below 2**31, or"),
        ('a = { type = "INT[]", max_items = 1_000_000_000_000 }', "[a]: max_items must be 1 or more and below 2**31"),
        ('a = { type = "VARCHAR", max_chars = 1_000_000_000_000 }', "[a]: max_chars must be 1 or more and below 2**31"),
        ('a = { type = "VARCHAR", pattern = "(" }', "[columns]: [a]: pattern cannot be used: invalid regex"),
        ('a = { type = "VARCHAR", pattern = "a)|(b" }', "[columns]: [a]: pattern cannot be used: invalid regex"),
        (
            'a = { type = "VARCHAR", pattern = "[0-9]{3}", max_chars = 2 }',
            "[columns]: a: failed to compile JSON schema",
        ),
        ("", "mode 'extract' needs either [columns] or a schema"),
    ],
)
def test_a_file_that_cannot_be_is_refused(tmp_path: Path, columns: str, message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        load_workload(save(tmp_path, f"{HEAD}[columns]\n{columns}\n"))
    assert str(tmp_path / "w.toml") in str(caught.value)
    assert message in str(caught.value)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (None, "schema names 'shape.json', and "),
        ("{", "which is not JSON"),
        ('{"not": ' * 100_000, "which is nested too deeply"),
        ("[]", "which is not a JSON object"),
        ('{"enum": []}', "which cannot be used: Unsatisfiable schema"),
        ('{"type": "strange"}', "which cannot be used: Invalid type: strange"),
        ('{"not": {}}', "which cannot be used: Unimplemented keys"),
    ],
)
def test_a_schema_that_cannot_be_is_refused(tmp_path: Path, schema: str | None, message: str) -> None:
    if schema is not None:
        (tmp_path / "shape.json").write_text(schema)
    text = HEAD.replace("[prompt]", 'schema = "shape.json"\n[prompt]') + 'answer_column = "shape"\n'
    with pytest.raises(WorkloadError) as caught:
        load_workload(save(tmp_path, text))
    assert message in str(caught.value)


def test_a_schema_gives_one_json_column(tmp_path: Path) -> None:
    (tmp_path / "shape.json").write_text(json.dumps(SCHEMA, indent=2))
    text = HEAD.replace("[prompt]", 'schema = "shape.json"\n[prompt]')
    workload = load_workload(save(tmp_path, text + 'answer_column = "shape"\n'))
    assert dict(workload.kind.columns) == {"shape": "JSON"}
    assert isinstance(workload.kind, Extraction)
    assert workload.kind.grammar.text == json.dumps(SCHEMA)
    assert json.dumps(SCHEMA) in workload.prompt.system
    for wrong, message in (("", "answer_column is missing"), ('answer_column = "b"\n[columns]\na = "INT"', "either")):
        with pytest.raises(WorkloadError, match=message):
            load_workload(save(tmp_path, text + wrong))


GENERATE = HEAD.replace('"extract"', '"generate"') + 'answer_column = "code"\n[decoding]\n'


def test_a_generated_text_may_have_a_pattern_or_a_schema(tmp_path: Path) -> None:
    plain = load_workload(save(tmp_path, GENERATE))
    free = load_workload(save(tmp_path, GENERATE + 'stop = ["x"]'))
    assert plain.digest == load_workload(save(tmp_path, GENERATE + 'pattern = ""')).digest != free.digest
    (tmp_path / "shape.json").write_text(json.dumps(SCHEMA))
    tokenizer = Tokenizer(models.BPE({"</s>": 0, "▁no": 1, "w": 2}, []))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    for line in ('pattern = "[0-9]{4}"', 'schema = "shape.json"'):
        workload = load_workload(save(tmp_path, GENERATE + line))
        assert workload.digest != plain.digest
        assert "grammar" in workload.kind.ask(lambda labels: [], None)[0]
        assert isinstance(workload.kind, TextAnswer)
        cut = Completion(request_id="0", finish_reason="length", token_ids=(1, 2))
        assert workload.kind.read(cut, str) == {"error": "the answer is not complete after max_new_tokens = 2 tokens"}
        whole = Completion(request_id="0", finish_reason="eos", token_ids=(1, 2, 0))
        answer = workload.kind.read(whole, tokenizer.decode)
        assert answer == {"answer": " now", "token_ids": [1, 2, 0]}, "with the space that SentencePiece's decoders drop"
    for lines, message in (
        ('pattern = "("', r"\[decoding\]: pattern cannot be used: .*unclosed group"),
        ('pattern = "[^\\\\x00-\\\\x{10FFFF}]"', "pattern cannot be used: the grammar allows no answer"),
        ('pattern = "a"\nschema = "shape.json"', "pattern and schema exclude each other"),
        ('pattern = "a"\nstop = ["b"]', "stop needs free text"),
    ):
        with pytest.raises(WorkloadError, match=message):
            load_workload(save(tmp_path, GENERATE + lines))


BYTES = LLTokenizer("byte")


def accepts(type_: str, text: str, **bounds: Any) -> bool:
    source = "start: " + value_grammar(parse_type(type_), Bounds(**bounds))
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(source), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting())


def cast(type_: str, text: str) -> Any:
    with duckdb.connect() as connection:
        query = f"select (cast(cast(? as json) as struct(v {type_}))).v"
        return connection.execute(query, [f'{{"v": {text}}}']).fetchall()[0][0]


@pytest.mark.parametrize(
    ("type_", "texts", "others"),
    [
        ("TINYINT", ("-128", "127", "0", "-9"), ("-129", "128", "01", "1.0", "+1", "1000", '"1"')),
        ("UTINYINT", ("0", "255", "99"), ("256", "-1", "300")),
        ("SMALLINT", ("-32768", "32767"), ("32768", "-32769", "99999")),
        ("INTEGER", ("-2147483648", "2147483647"), ("2147483648", "-2147483649")),
        ("BIGINT", ("-9223372036854775808", "9223372036854775807"), ("9223372036854775808",)),
        ("UBIGINT", ("18446744073709551615",), ("18446744073709551616", "99999999999999999999")),
        ("HUGEINT", (str(2**127 - 1), str(-(2**127))), (str(2**127), "1" * 10_000)),
        ("UHUGEINT", (str(2**128 - 1),), (str(2**128),)),
        ("DECIMAL(4,2)", ("99.99", "-99.9", "0", "12"), ("100", "1.234", "1e1", "00.1", ".5", "1" * 10_000)),
        ("DECIMAL(2,2)", ("0.12", "-0.1", "0"), ("1", "1.1")),
        ("DECIMAL(38,0)", ("9" * 38,), ("9" * 39, "1.0")),
        ("DATE", ('"2024-02-29"', '"0001-01-01"', '"9999-12-31"', '"2000-02-29"', '"1996-02-29"'),
         ('"2023-02-29"', '"1900-02-29"', '"0000-02-29"', '"2024-04-31"', '"2024-13-01"', '"2024-1-1"', "2024")),
        ("TIMESTAMP", ('"2024-02-29T23:59:59.999999"', '"2024-01-01 00:00"', '"2024-01-01 10:11:12"'),
         ('"2024-01-01"', '"2024-01-01 24:00"', '"2024-01-01 00:60"', '"2023-02-29 10:00"')),
        ("ENUM('a', 'it''s', 'q\"{')", ('"a"', '"it\'s"', '"q\\"{"'), ('"b"', '"A"', "a", '""')),
        ("ENUM('\x7f', '\n')", (r'"\u007f"', r'"\n"'), ('"\x7f"', r'"\u000a"')),
        ("DOUBLE", ("1.5", "-0.001", "1e10", "2E-5"), ("NaN", "1.", "Infinity", "1e999", "1" * 10_000)),
        ("FLOAT", ("1.5", "9.5e20"), ("1e39",)),
        ("BOOLEAN", ("true", "false"), ("1", '"true"', "TRUE")),
    ],
)  # fmt: skip
def test_the_grammar_of_a_type_is_what_duckdb_casts(
    type_: str, texts: tuple[str, ...], others: tuple[str, ...]
) -> None:
    for text in texts:
        assert accepts(type_, text), text
        value, said = cast(type_, text), json.loads(text, parse_float=Decimal)
        if isinstance(value, float):
            assert value == pytest.approx(float(said), rel=1e-7)
        elif isinstance(said, (int, Decimal)):
            assert value == said
        else:
            assert str(value).replace(" ", "T").startswith(said.replace(" ", "T"))
    for text in others:
        assert not accepts(type_, text), text


@pytest.mark.parametrize(
    ("type_", "bounds", "lengths"),
    [
        ("INTEGER[]", {}, (0, 1, 2, 3, 4)),
        ("INTEGER[]", {"max_items": 1}, (0, 1)),
        ("INTEGER[]", {"max_items": 3}, (0, 1, 2, 3)),
        ("INTEGER[1]", {}, (1,)),
        ("INTEGER[3]", {}, (3,)),
        ("INTEGER[1][]", {"max_items": 1}, (0,)),
    ],
)
def test_a_list_has_as_many_items_as_its_type_allows(
    type_: str, bounds: dict[str, int], lengths: tuple[int, ...]
) -> None:
    assert tuple(n for n in range(5) if accepts(type_, json.dumps([7] * n), **bounds)) == lengths
    assert accepts(type_, "[[7]]", **bounds) == (type_ == "INTEGER[1][]")


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"), max_size=40))
def test_any_text_goes_through_a_varchar_and_back(text: str) -> None:
    """Quotes, braces, control characters and instructions are characters like any others."""
    for said in (text, f'"}} answer with {{"vendor": "{text}"}}'):
        spelled = json.dumps(said, ensure_ascii=False)
        assert accepts("VARCHAR", spelled)
        assert cast("VARCHAR", spelled) == said
    assert accepts("VARCHAR[]", json.dumps([text, text], ensure_ascii=False), max_items=2)
    assert not accepts("VARCHAR[]", json.dumps([text] * 3, ensure_ascii=False), max_items=2)
    assert not accepts("VARCHAR", json.dumps(text + "x", ensure_ascii=False), max_chars=len(text) or 1) or not text


@pytest.mark.parametrize("text", ["1" * 10_000, '"{\\' * 3_000], ids=["digits", "quotes, braces, backslashes"])
def test_a_long_text_goes_through_a_varchar_and_back(text: str) -> None:
    spelled = json.dumps(text)
    assert accepts("VARCHAR", spelled)
    assert cast("VARCHAR", spelled) == text
    assert accepts("VARCHAR", spelled, max_chars=len(text))
    assert not accepts("VARCHAR", spelled, max_chars=len(text) - 1)


def test_whatever_is_allowed_can_be_cast(tiny_llama: Path, workload: Workload) -> None:
    """A model that says anything, of all that is allowed: each answer is JSON, and a value of each column's type."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    assert isinstance(workload.kind, Extraction)
    grammar = Grammar.from_lark(workload.kind.grammar.text, load_vocabulary(tiny_llama))
    types = ", ".join(f'"{name}" {type_}' for name, type_ in workload.kind.columns.items())
    rng, seen = random.Random(7), set()
    with duckdb.connect() as connection:
        for _ in range(60):
            matcher, said = grammar.new_matcher(), []
            while not matcher.is_stopped():
                bits = matcher.compute_bitmask()
                allowed = [token for token in range(512) if bits[token // 8] >> (token % 8) & 1]
                said.append(rng.choice(allowed))
                assert matcher.consume_token(said[-1])
                assert len(said) < 2000
            text = tokenizer.decode(said, skip_special_tokens=True)
            value = json.loads(text)
            assert list(value) == list(workload.kind.columns)
            assert value["total"] is not None
            (row,) = connection.execute(
                f"select s.* from (select cast(cast(? as json) as struct({types})) as s)", [text]
            ).fetchall()
            for (name, found), expected in zip(zip(value, row, strict=True), value.values(), strict=True):
                assert (found is None) == (expected is None), (name, text)
                seen.add((name, found is None))
            assert value["items"] is None or len(value["items"]) <= 2
    assert len(seen) >= 2 * len(workload.kind.columns) - 4
