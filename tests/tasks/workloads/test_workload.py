"""A workload file is read strictly: what is unknown, missing or impossible is named, with its file and place."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import WorkloadError
from tasks.answers.score import LabelScore, ScoreOutput
from tasks.answers.text import Decoding, TextAnswer, TextOutput
from tasks.workloads.workload import SHIPPED, load_workload

GENERATE = """
name = "titles"
mode = "generate"
requests_sql = "select_titles.sql"
key = ["doc_id"]

[prompt]
template = "{body} {{braces}} {extra}{body}!"
system = "Be brief."
may_be_empty = ["extra"]
chat = false

[decoding]
max_new_tokens = 5
temperature = 1
top_k = 3
top_p = 0.5
seed = 9
stop = ["x"]

[output]
table = "titles"
answer_column = "title"
"""
SCORE = """
name = "spam"
mode = "score"
requests_sql = "select_titles.sql"
key = ["doc_id", "part"]
labels = ["yes", "no", "not sure"]
[prompt]
template = "{body}"
[output]
table = "spam"
rank_within = "part"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "select_titles.sql").write_text("select 1 as doc_id, 'b' as body, null as extra")
    return tmp_path


def save(folder: Path, text: str) -> Path:
    path = folder / "w.toml"
    path.write_text(text)
    return path


def test_a_generate_workload(folder: Path) -> None:
    path = save(folder, GENERATE)
    workload = load_workload(path)
    assert (workload.name, workload.kind.mode, workload.key) == ("titles", "generate", ("doc_id",))
    assert workload.source == str(path)
    assert workload.requests_sql.startswith("select 1 as doc_id")
    assert workload.prompt.segments == (
        ("", "body"),
        (" {", None),
        ("braces}", None),
        (" ", "extra"),
        ("", "body"),
        ("!", None),
    )
    assert workload.prompt.fields == ("body", "extra")
    assert workload.columns == ("doc_id", "body", "extra")
    assert not workload.prompt.chat
    decoding = Decoding(max_new_tokens=5, temperature=1.0, top_k=3, top_p=0.5, seed=9, stop=("x",))
    assert workload.kind == TextAnswer(decoding=decoding, output=TextOutput(table="titles", answer_column="title"))
    assert load_workload(str(path)) == workload


def test_a_score_workload(folder: Path) -> None:
    workload = load_workload(save(folder, SCORE))
    assert workload.kind == LabelScore(
        labels=("yes", "no", "not sure"), output=ScoreOutput(table="spam", rank_within="part")
    )
    assert workload.prompt.chat
    assert workload.prompt.system == ""


def test_the_shipped_ones() -> None:
    snippets, ranking = load_workload("snippets"), load_workload("ranking")
    assert (snippets.name, snippets.kind.mode, snippets.key) == ("snippets", "generate", ("doc_id", "query_id"))
    assert (ranking.name, ranking.kind.mode, ranking.key) == ("ranking", "score", ("query_id", "doc_id"))
    assert snippets.prompt.fields == ("title", "body", "query_text"), "what is shared comes first"
    assert ranking.prompt.fields == ("query_text", "title", "body")
    assert (snippets.source, ranking.source) == ("snippets", "ranking")
    assert ranking.kind.rank_within == "query_id"
    for workload in (snippets, ranking):
        assert workload.prompt.chat
        assert not workload.prompt.template.startswith(("\n", " "))


def test_the_digest_is_of_what_decides_an_answer(folder: Path) -> None:
    workload = load_workload(save(folder, GENERATE))
    kind = workload.kind
    assert isinstance(kind, TextAnswer)
    same = [
        replace(workload, name="other"),
        replace(workload, source="elsewhere"),
        replace(workload, requests_sql="select 2"),
        replace(workload, kind=replace(kind, output=replace(kind.output, table="t"))),
    ]
    other = [
        replace(workload, prompt=replace(workload.prompt, template="{body}{extra}")),
        replace(workload, prompt=replace(workload.prompt, system="")),
        replace(workload, prompt=replace(workload.prompt, chat=True)),
        replace(workload, kind=replace(kind, decoding=replace(kind.decoding, stop=()))),
        replace(workload, kind=replace(kind, decoding=replace(kind.decoding, seed=1))),
        replace(workload, kind=replace(kind, decoding=replace(kind.decoding, repetition_penalty=1.1))),
        replace(workload, kind=replace(kind, decoding=replace(kind.decoding, presence_penalty=1.1))),
        replace(workload, prompt=replace(workload.prompt, cut="body")),
        replace(workload, kind=LabelScore(labels=("a", "b"), output=ScoreOutput(table="titles"))),
        replace(workload, kind=LabelScore(labels=("b", "a"), output=ScoreOutput(table="titles"))),
    ]
    assert {each.digest for each in same} == {workload.digest}
    assert len({workload.digest, *(each.digest for each in other)}) == len(other) + 1


GENERATE_FAULTS = [
    ('name = "titles"', "", "name is missing; expected a string"),
    ('name = "titles"', 'name = "a/b"', "name must hold letters, digits"),
    ('name = "titles"', 'nmae = "titles"\nname = "t"', "'nmae' is not a known key"),
    ('name = "titles"', f'name = "{"x" * 129}"', "name must be a printable name of at most 128 characters"),
    ('name = "titles"', "name = 3", "name must be a string, got 3"),
    ('mode = "generate"', 'mode = "guess"', "'score', 'extract', 'decide' or 'embed', got 'guess'"),
    ('mode = "generate"', 'mode = "generate"\nlabels = ["a", "b"]', "labels belong to mode 'score'"),
    ("[output]", '[columns]\ntotal = "INTEGER"\n[output]', "columns belong to mode 'extract'"),
    ("[prompt]", 'question_template = "{question}"\n[prompt]', "question_template belongs to mode 'decide'"),
    ("[prompt]", "dimensions = 64\n[prompt]", "dimensions belongs to mode 'embed'"),
    ("[prompt]", "max_thinking_tokens = 5\n[prompt]", "max_thinking_tokens belongs to thinking = 'keep' or 'drop'"),
    ('key = ["doc_id"]', "key = []", "key must name one or more different columns"),
    ('key = ["doc_id"]', 'key = "doc_id"', "key must be a list of strings, got 'doc_id'"),
    ('key = ["doc_id"]', 'key = ["doc_id", "DOC_ID"]', "key must name one or more different columns"),
    ('key = ["doc_id"]', 'key = ["doc_id", ""]', "key must be a list of non-empty strings"),
    ('key = ["doc_id"]', 'key = ["a\\nb"]', "key must be a printable name"),
    ('key = ["doc_id"]', 'key = ["Run_ID"]', "key may not use the column name 'Run_ID'"),
    ('key = ["doc_id"]', 'key = ["title"]', "key and the answer columns must all differ"),
    ('"select_titles.sql"', '"../select_titles.sql"', "requests_sql must be a plain file name"),
    ('"select_titles.sql"', '"absent.sql"', "requests_sql names 'absent.sql', found neither as '/"),
    ('"select_titles.sql"', r'"a\nb.sql"', r"a\nb.sql' nor as"),
    ("max_new_tokens = 5", r'schema = "a\nb.json"', r"a\nb.json' cannot be read"),
    ("{extra}", "{extra.x}", "[prompt]: template has a field {extra.x} that is not a plain column name"),
    ("{extra}", "{extra[0]}", "template has a field {extra[0]} that is not a plain"),
    ("{extra}", "{extra:>9}", "{extra:>9} that is not a plain column name; conversions and formats are not"),
    ("{extra}", "{extra!r}", "{extra!r} that is not a plain column name; conversions and formats are not"),
    ("{extra}", "{extra!s:4}", "{extra!s:4} that is not a plain column name"),
    ("{extra}", "{extra} {Extra}", "template names a column twice, with other capitals"),
    ("{extra}", "{}", "template has a field {} that is not a plain"),
    ("{extra}", "{extra", "[prompt]: template cannot be read"),
    ("{extra}", "{extra}{error}", "prompt.template may not use the column name 'error'"),
    ("{body} {{braces}} {extra}{body}!", "no field", "template must hold at least one {field}"),
    (
        'may_be_empty = ["extra"]',
        'may_be_empty = ["titel"]',
        "may_be_empty names 'titel', which the template does not use",
    ),
    ("chat = false", 'cut = "titel"', "cut names 'titel', which the template does not use"),
    ("chat = false", 'chat = "no"', "[prompt]: chat must be true or false, got 'no'"),
    ("chat = false", "chta = false", "[prompt]: 'chta' is not a known key here"),
    ("max_new_tokens = 5", "max_new_tokens = 0", "max_new_tokens must be at least 1, got 0"),
    ("max_new_tokens = 5", "max_new_tokens = 5.5", "[decoding]: max_new_tokens must be a whole number, got 5.5"),
    ("max_new_tokens = 5", "max_new_tokens = true", "max_new_tokens must be a whole number, got True"),
    ("max_new_tokens = 5", "max_tokens = 5", "[decoding]: 'max_tokens' is not a known key here"),
    ("temperature = 1", "temperature = -1", "temperature must be a number from 0 on"),
    ("temperature = 1", "temperature = nan", "temperature must be a number from 0 on"),
    ("top_p = 0.5", "top_p = 0", "top_p must be above 0"),
    ("top_p = 0.5", "repetition_penalty = 0", "repetition_penalty must be above 0, got 0.0"),
    ("top_p = 0.5", "frequency_penalty = nan", "frequency_penalty must be a finite number, got nan"),
    ('stop = ["x"]', 'stop = ["x", 1]', "stop must be a list of non-empty strings"),
    ('table = "titles"', "", "[output]: table is missing"),
    ('table = "titles"', 'table = "Documents"', "table may not be 'Documents'"),
    ('table = "titles"', 'table = "Snippets"', "table may not be 'Snippets', whose views show rows of"),
    ('table = "titles"', 'table = "rankings"', "rows of select_ranking_requests.sql: name another"),
    ('table = "titles"', 'table = "main.titles"', "without a dot, got 'main.titles'"),
    ('table = "titles"', f'table = "{"x" * 129}"', "at most 128 characters"),
    ('answer_column = "title"', "", "[output]: answer_column is missing"),
    ('answer_column = "title"', 'answer_column = "status"', "answer_column may not be 'status'"),
    ('answer_column = "title"', 'answer_column = "title"\nrank_within = "doc_id"', "'rank_within' is not a known key"),
    ("[output]", "[[output]]", "output must be a table"),
    ("[output]", "[output", "cannot be read as TOML"),
]
SCORE_FAULTS = [
    ('labels = ["yes", "no", "not sure"]', "", "labels is missing; expected a list of strings"),
    ('"yes", "no", "not sure"', '"yes"', "labels must hold two or more different strings"),
    ('"yes", "no", "not sure"', '"yes", "no", "yes"', "labels must hold two or more different strings"),
    ('"yes", "no", "not sure"', '"yes", ""', "labels must be a list of non-empty strings"),
    ("[output]", "[decoding]\nmax_new_tokens = 5\n[output]", "decoding belongs to modes 'generate' and 'extract'"),
    ("[prompt]", "max_thinking_tokens = 5\n[prompt]", "max_thinking_tokens belongs to thinking = 'keep' or 'drop'"),
    ('rank_within = "part"', 'rank_within = "body"', "rank_within must be one of the key columns ['doc_id', 'part']"),
    ('rank_within = "part"', 'answer_column = "label"', "'answer_column' is not a known key here"),
    ('key = ["doc_id", "part"]', 'key = ["rank", "part"]', "key and the answer columns must all differ"),
]


@pytest.mark.parametrize(
    ("text", "old", "new", "message"),
    [(GENERATE, *fault) for fault in GENERATE_FAULTS] + [(SCORE, *fault) for fault in SCORE_FAULTS],
)
def test_a_fault_is_named(folder: Path, text: str, old: str, new: str, message: str) -> None:
    assert old in text
    path = save(folder, text.replace(old, new, 1))
    with pytest.raises(WorkloadError) as caught:
        load_workload(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value).splitlines()) == 1


def test_a_decoding_table_of_defaults_is_no_contradiction(folder: Path) -> None:
    load_workload(save(folder, SCORE.replace("[output]", "[decoding]\n[output]")))


def test_a_shipped_table_has_rows_of_its_own_query_alone(folder: Path) -> None:
    shipped = (SHIPPED / "snippets.toml").read_text().replace('name = "snippets"', 'name = "brief"')
    assert load_workload(save(folder, shipped)).output.table == "snippets"
    (folder / "select_snippet_requests.sql").write_text("select doc_id, body, title, '' as query_id, '' as query_text")
    with pytest.raises(WorkloadError, match=r"w\.toml: line 25: \[output\]: table may not be 'snippets'"):
        load_workload(folder / "w.toml")


def test_files_may_begin_with_a_byte_order_mark(folder: Path) -> None:
    plain = load_workload(save(folder, GENERATE))
    for path in (folder / "w.toml", folder / "select_titles.sql"):
        path.write_text("\ufeff" + path.read_text())
    assert load_workload(folder / "w.toml") == plain


def test_a_query_that_is_not_utf_8_is_named(folder: Path) -> None:
    (folder / "select_titles.sql").write_bytes("select 'é' as body".encode("latin-1"))
    expected = r"w\.toml: line 4: requests_sql names 'select_titles\.sql', which cannot be read: 'utf-8' codec"
    with pytest.raises(WorkloadError, match=expected):
        load_workload(save(folder, GENERATE))


@pytest.mark.parametrize("name", [path.stem for path in SHIPPED.glob("*.toml")])
def test_a_document_needs_no_title(name: str) -> None:
    assert load_workload(name).prompt.may_be_empty == ("title",)


def test_a_workload_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        WorkloadError,
        match=r"no workload 'snipets'.*: embeddings, facets, facts, ranking, snippets; a file of your own ends",
    ):
        load_workload("snipets")
    (tmp_path / "night.toml").write_text('database = "x"\n[models.small]\npath = "x"')
    with pytest.raises(WorkloadError, match=r"night\.toml: .*a night's file, not a workload's: batchloom nightly FILE"):
        load_workload(tmp_path / "night.toml")
    with pytest.raises(WorkloadError, match=r"no file .*own\.toml"):
        load_workload(str(tmp_path / "own.toml"))
    with pytest.raises(WorkloadError, match="cannot be read"):
        load_workload(tmp_path)
