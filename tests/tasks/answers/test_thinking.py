"""The keys of thinking: what they add to a kind of answer, and which files are refused."""

from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.completion import Completion
from engine.errors import WorkloadError
from engine.request import Request
from engine.scheduling.sequence import Sequence, expected_extra_tokens
from tasks.workloads.workload import Workload, load_workload

MODES = {
    "generate": ('[output]\ntable = "answers"\nanswer_column = "answer"', ""),
    "extract": ('[columns]\nkind = "VARCHAR"\n[output]\ntable = "answers"', ""),
    "score": ('[output]\ntable = "answers"', 'labels = ["yes", "no"]'),
    "decide": ('[questions]\nfine = { type = "BOOLEAN", ask = "?" }\n[output]\ntable = "answers"', ""),
    "embed": ('[output]\ntable = "answers"', ""),
}

Load = Callable[..., Workload]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads a workload of a mode with more keys."""
    (tmp_path / "query.sql").write_text("select 'a' as id, 'b' as body")

    def load(mode: str, keys: str = "", prompt: str = "") -> Workload:
        tables, own = MODES[mode]
        path = tmp_path / "answers.toml"
        path.write_text(
            f'name = "answers"\nmode = "{mode}"\nrequests_sql = "query.sql"\nkey = ["id"]\n{own}\n{keys}\n'
            f'[prompt]\ntemplate = "{{body}}"\n{prompt}\n{tables}\n'
        )
        return load_workload(path)

    return load


@pytest.mark.parametrize("mode", ["generate", "extract"])
def test_thoughts_have_a_budget_of_their_own(load: Load, mode: str) -> None:
    plain = load(mode)
    off = load(mode, 'thinking = "off"')
    drop = load(mode, 'thinking = "drop"\nmax_thinking_tokens = 100')
    keep = load(mode, 'thinking = "keep"\nmax_thinking_tokens = 100')
    longer = load(mode, 'thinking = "drop"\nmax_thinking_tokens = 101')
    assert [each.kind.thinking for each in (plain, off, drop, keep)] == ["", "off", "drop", "keep"]
    assert len({each.digest for each in (plain, off, drop, keep, longer)}) == 5
    most = plain.kind.max_answer_tokens
    assert [each.kind.max_answer_tokens for each in (off, drop, keep, longer)] == [
        most,
        most + 100,
        most + 100,
        most + 101,
    ]
    assert plain.kind.columns == off.kind.columns == drop.kind.columns
    assert keep.kind.columns == {**plain.kind.columns, "thinking": "VARCHAR"}
    (settings,) = drop.kind.ask(lambda labels, suffix="": (), None)
    assert settings["max_new_tokens"] == most + 100
    assert settings["thinking"].max_tokens == 100


@pytest.mark.parametrize("mode", ["generate", "extract"])
@pytest.mark.parametrize("keys", ["", 'thinking = "drop"\nmax_thinking_tokens = 100'])
def test_a_forecast_schedules_such_requests_without_a_model(load: Load, mode: str, keys: str) -> None:
    (settings,) = load(mode, keys).kind.ask(lambda labels, suffix="": (), 7)
    sequence = Sequence(request=Request(request_id="0", token_ids=[1, 2], **settings), owners=(0,), node=None)
    assert sequence.length == 2
    assert expected_extra_tokens(sequence.request) == 6


@pytest.mark.parametrize("mode", ["score", "decide"])
def test_what_decodes_nothing_turns_thinking_off(load: Load, mode: str) -> None:
    plain, off = load(mode), load(mode, 'thinking = "off"')
    assert off.kind.thinking == "off"
    assert off.digest != plain.digest
    assert off.kind.columns == plain.kind.columns
    if mode == "decide":
        assert off.kind.question_digests != plain.kind.question_digests


@pytest.mark.parametrize(
    ("mode", "keys", "prompt", "message"),
    [
        ("score", 'thinking = "keep"', "", "thinking must be 'off' where nothing is decoded, got 'keep'"),
        ("decide", 'thinking = "drop"', "", "thinking must be 'off' where nothing is decoded, got 'drop'"),
        ("generate", 'thinking = "on"', "", "thinking must be 'off', 'keep' or 'drop', got 'on'"),
        ("generate", 'thinking = "keep"', "", "thinking = 'keep' needs max_thinking_tokens"),
        ("extract", 'thinking = "drop"\nmax_thinking_tokens = -3', "", "thinking = 'drop' needs max_thinking_tokens"),
        (
            "generate",
            'thinking = "off"\nmax_thinking_tokens = 9',
            "",
            "max_thinking_tokens belongs to thinking = 'keep'",
        ),
        ("generate", "max_thinking_tokens = 9", "", "max_thinking_tokens belongs to thinking = 'keep' or 'drop'"),
        (
            "score",
            'thinking = "off"\nmax_thinking_tokens = 9',
            "",
            "max_thinking_tokens belongs to thinking = 'keep' or 'drop'",
        ),
        ("generate", 'thinking = "off"', "chat = false", "switch of chat templates, and the prompt is plain text"),
        ("embed", 'thinking = "off"', "", "switch of chat templates, and the prompt is plain text"),
    ],
)
def test_what_cannot_be_is_refused(load: Load, mode: str, keys: str, prompt: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        load(mode, keys, prompt)


def test_the_column_of_thoughts_is_not_another_one(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = MODES["extract"][0].replace("kind =", "Thinking =")
    monkeypatch.setitem(MODES, "extract", (tables, ""))
    with pytest.raises(WorkloadError, match="thinking = 'keep' writes a column 'thinking'"):
        load("extract", 'thinking = "keep"\nmax_thinking_tokens = 20')


def test_a_character_of_the_thoughts_that_is_cut_by_their_budget_is_left_out(load: Load) -> None:
    """The line break before the mark that ends the thoughts is theirs."""
    kind = load("generate", 'thinking = "keep"\nmax_thinking_tokens = 9').kind
    completion = Completion(request_id="0", finish_reason="eos", token_ids=[1, 0], thinking_token_ids=[2])
    values = kind.read(completion, lambda ids: {1: "so kind", 2: "the night \ufffd\n"}[ids[0]])
    assert (values["answer"], values["thinking"]) == ("so kind", "the night")


@given(text=st.text())
def test_thoughts_of_any_text_are_cast_with_the_columns(text: str) -> None:
    from tasks.answers.thinking import ThinkingExtraction

    kind = ThinkingExtraction(
        thinking="keep", max_thinking_tokens=9, columns={"kind": {"type": "VARCHAR"}}, output={"table": "answers"}
    )  # type: ignore[call-arg]
    completion = Completion(request_id="0", finish_reason="eos", token_ids=[1, 0], thinking_token_ids=[2])
    tokens = {1: '{"kind": "a}b"}', 2: f" {text}\n"}
    values = kind.read(completion, lambda ids: "".join(tokens[token_id] for token_id in ids))
    query = "select unnest(cast(cast($answer as json) as struct(kind varchar, thinking varchar)))"
    thoughts = text.strip().rstrip("\ufffd").rstrip()
    assert duckdb.execute(query, {"answer": values["answer"]}).fetchall() == [("a}b", thoughts)]
