"""The line of a workload's file that is wrong is named, however its tables are written."""

import json
from pathlib import Path

import pytest

from engine.errors import WorkloadError
from tasks.answers.grammar_source import GrammarSource
from tasks.workloads.fault import find_line
from tasks.workloads.workload import load_workload

EXTRACT = '''name = "invoices"
mode = "extract"
requests_sql = "query.sql"
key = ["id"]
[prompt]
system = """
[columns]
total = "not a line of the file's own"
"""
template = "{body}"
[output]
table = "invoices"
[columns]
vendor = "VARCHAR"
total = { type = "DECIMAL(12,2)", ask = "the amount due" }
'''
DECIDE = """name = "facets"
mode = "decide"
requests_sql = "query.sql"
key = ["id"]
prompt.template = "{body}"
output.table = "facets"
[questions.urgent]
type = "BOOLEAN"
ask = "Now?"
[questions.topic]
type = "ENUM('a', 'b')"
ask = "What?"
"""
GENERATE = """name = "texts"
mode = "generate"
requests_sql = "query.sql"
key = ["id"]
[prompt]
template = "{body}"
[decoding]
max_new_tokens = 9
pattern = "[a-z]+"
[output]
table = "texts"
answer_column = "text"
"""
RERANK = """name = "relevance"
mode = "score"
labels = "checkpoint"
requests_sql = "query.sql"
key = ["id"]
pair = "{title}"
[prompt]
template = "{body}"
[output]
table = "relevance"
"""
NESTS = "(" * 400 + "a" + ")" * 400
EXPLODES = "(.*a.{60}){3}"
EXPLODES_LATE = ".*a.{2000}"  # only a long answer shows it

FAULTS = [
    (EXTRACT, '"VARCHAR"', '"VARCHARS"', "[columns]: [vendor]: type 'VARCHARS' is not a type of DuckDB"),
    (EXTRACT, '"VARCHAR"', '"ENUM()"', "ENUM type requires at least one argument"),
    (GENERATE, 'mode = "generate"', 'columns = 3\nmode = "extract"', "columns must be a table, got 3"),
    (EXTRACT, "total = {", "Vendor = {", "[columns]: Vendor: an earlier column has this name"),
    (EXTRACT, "total = {", "vendor = {", "cannot be read as TOML: Cannot overwrite a value (at line 15"),
    (EXTRACT, "total = {", "status = {", "[columns]: status: batchloom writes a column of this name itself"),
    (
        EXTRACT,
        '"VARCHAR"',
        f'{{ type = "VARCHAR", pattern = "{NESTS}" }}',
        "[columns]: [vendor]: pattern cannot be used: ",
    ),
    (EXTRACT, '"VARCHAR"', '{ type = "VARCHAR", pattern = "ab", max_chars = 1 }', "[columns]: vendor: failed to"),
    (EXTRACT, '{ type = "DECIMAL(12,2)"', '{ typ = "DECIMAL(12,2)"', "[columns]: [total]: "),
    (DECIDE, "\"ENUM('a', 'b')\"", '"ENUM()"', "ENUM type requires at least one argument"),
    (DECIDE, "[questions.topic]", "[questions.urgent_probability]", "give the column 'urgent_probability' twice"),
    (DECIDE, 'output.table = "facets"', 'output.table = "runs"', "[output]: table may not be 'runs'"),
    (DECIDE, "\"ENUM('a', 'b')\"", '"JSON"', "must be BOOLEAN, ENUM"),
    (GENERATE, '"[a-z]+"', f'"{NESTS}"', "[decoding]: pattern cannot be used"),
    (GENERATE, '"[a-z]+"', f'"{EXPLODES}"', f"[decoding]: pattern cannot be used: the pattern '{EXPLODES}' explodes"),
    (GENERATE, '"[a-z]+"', f'"{EXPLODES_LATE}"', f"[decoding]: pattern cannot be used: the pattern '{EXPLODES_LATE}'"),
    (
        EXTRACT,
        '"VARCHAR"',
        f'{{ type = "VARCHAR", pattern = "{EXPLODES}" }}',
        "[vendor]: pattern cannot be used: the pattern '",
    ),
    (GENERATE, 'pattern = "[a-z]+"', 'schema = "explodes.json"', f"the pattern '{EXPLODES}' explodes"),
    (GENERATE, '"[a-z]+"', '"(?=a)b"', "[decoding]: pattern cannot be used"),
    (GENERATE, 'pattern = "[a-z]+"', 'schema = "nothing.json"', "which cannot be used"),
    (GENERATE, '"texts"\nanswer', '"texts"\nanswr', "[output]: 'answr_column' is not a known key here"),
    (GENERATE, "[prompt]", "[promt]", "'promt' is not a known key here"),
    (GENERATE, "max_new_tokens = 9", "max_new_tokens = 9.5", "must be a whole number"),
    (GENERATE, '"query.sql"', '"damaged.sql"', "names 'damaged.sql', which cannot be read: [Errno 5]"),
    (GENERATE, "[prompt]", "kind = 5\n[prompt]", "'kind', 'source', 'row_layouts' are no keys here"),
    (RERANK, '"{title}"', '"{title"', "pair: template cannot be read: expected '}' before end of string"),
    (RERANK, '"{title}"', '"{Body}"', "pair: template names a column twice, with other capitals"),
]


@pytest.mark.parametrize(("text", "old", "new", "message"), FAULTS)
def test_the_line_that_is_wrong_is_named(tmp_path: Path, text: str, old: str, new: str, message: str) -> None:
    (tmp_path / "query.sql").write_text("select 'a' as id, 'b' as body")
    (tmp_path / "damaged.sql").symlink_to("/proc/self/mem")  # whose beginning nobody can read
    (tmp_path / "nothing.json").write_text('{"type": "string", "enum": []}')
    strings = {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": EXPLODES}]}}
    (tmp_path / "explodes.json").write_text(json.dumps(strings))
    assert text.count(old) == 1 or old == '"VARCHAR"'
    wrong = text.replace(old, new)
    path = tmp_path / "own.toml"
    path.write_text(wrong)
    with pytest.raises(WorkloadError) as caught:
        load_workload(path)
    assert message in str(caught.value)
    number = wrong[: wrong.index(new)].count("\n") + 1
    if "TOML" not in message:
        is_missing = "answr" in new  # the table that lacks the key, or the key that is not known
        assert any(
            f"{path}: line {n}: " in str(caught.value)
            for n in ((number - 1, number, number + 1) if is_missing else (number,))
        )


def test_lines_are_found_in_every_way_to_write_a_table() -> None:
    text = "a = 1\n[ b . 'c d' ] # here\n\"e f\" = '''\nx = 2\n'''\nx = 3\ny.z = 4\n[[g]]\nh = [\n  'i = 1',\n]\n"
    for steps, line in (
        (["a"], 1),
        (["b"], None),
        (["b", "c d"], 2),
        (["b", "c d", "e f"], 3),
        (["b", "c d", "x"], 6),
        (["b", "c d", "y", "z"], 7),
        (["b", "c d", "none"], 2),
        (["g", "h"], 9),
        (["none"], None),
        ([], None),
    ):
        assert find_line(text, steps) == line, steps


@pytest.mark.parametrize(
    "pattern",
    [
        "(.*a.{60}){3}",
        "(.*a.{100}|.*b.{101})*",
        "([ab]*a[ab]{200}c)*",
        "(a?){300}a{300}",
        "(a{1,100}){1,100}",
        r"(\w+\s?){1,300}",
        r"(.{0,200}\n?){1,50}",
        ".*a.{40}.*b.{40}.*c.{40}",
    ],
)
def test_a_pattern_that_explodes_while_it_is_matched_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"explodes: matching .* bytes into an answer"):
        GrammarSource("pattern", pattern).check()


@pytest.mark.parametrize(
    "pattern",
    [
        "[A-Z]{2}-[0-9]{4}",
        "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
        r"\d{4}-\d{2}-\d{2}(T\d{2}:\d{2}(:\d{2})?)?",
        r"[\w.+-]+@[\w-]+(\.[\w-]+)+",
        r"https?://[^\s/]+(/[^\s]*)?",
        ".{1,2000}",
        "(?s:.*)",
        ".*foo.*bar.*baz.*",
        ".*a.{8}",
        r"[^,\n]{0,80}(,[^,\n]{0,80}){0,20}",
        r"\p{L}{1,60}( \p{L}{1,60}){0,50}",
        r"([A-Z][a-z]{0,30}( [a-z]{1,30}){0,40}[.!?] ?){1,20}",
        r"(\w+ ){0,200}\w+",
        r"(\w+ ?){1,20}",
        "(" + "|".join(f"value {number * 7919 % 100_003}" for number in range(1000)) + "){1,10}",
    ],
)
def test_patterns_that_people_write_are_not_taken_for_such(pattern: str) -> None:
    GrammarSource("pattern", pattern).check()
    anchored = {"type": "string", "pattern": f"^(?:{pattern})$"}
    GrammarSource("schema", json.dumps(anchored)).check()
    GrammarSource("schema", json.dumps({"const": {"pattern": "("}})).check()
