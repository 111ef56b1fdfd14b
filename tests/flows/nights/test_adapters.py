"""Nights with LoRA adapters: part of what makes an answer, checked before any work, several on a base loaded once."""

from pathlib import Path
from typing import Any

import pytest

from engine.errors import BatchloomError, ConfigError, DatabaseError, ModelError
from flows import workload_run
from flows.nights.night import night
from flows.nights.night_file import load_night
from tasks.workloads.workload import load_workload
from tests.adapters import save_adapter
from tests.flows.nights.night_text import night_text

WORKLOAD = """
name = "{name}"
mode = "generate"
requests_sql = "about.sql"
key = ["doc_id", "query_id"]
{adapter}
[prompt]
chat = false
template = "{{body}} -- {{query_text}}"
[decoding]
max_new_tokens = 5
[output]
table = "{name}"
answer_column = "answer"
"""

SQL = "select documents.doc_id, queries.query_id, body, query_text from documents cross join queries"


@pytest.fixture
def folder(nights: Any, tiny_llama: Path) -> Path:
    """The database's, with two adapters, a query, and workloads that name none, the first and none."""
    place = Path(nights.path.parent)
    for seed, name in enumerate(("first", "second")):
        save_adapter(tiny_llama, place / name, seed)
    (place / "about.sql").write_text(SQL)
    for name, adapter in {"plain": "", "one": 'adapter = "first"', "two": ""}.items():
        (place / f"{name}.toml").write_text(WORKLOAD.format(name=name, adapter=adapter))
    tables = "".join(f'[[workload]]\nfile = "{name}.toml"\n' for name in ("plain", "one", "two"))
    (place / "night.toml").write_text(night_text({"small": tiny_llama}) + tables + 'adapter = "second"\n')
    return place


def answers(nights: Any, name: str) -> list[tuple[Any, ...]]:
    return list(nights.sql(f"select doc_id, query_id, answer from latest_{name} where status = 'ok' order by 1, 2"))


def test_adapters_of_a_night_share_a_base_that_is_loaded_once(
    nights: Any, folder: Path, prefect_server: str, loads: list[tuple[Path, Any]]
) -> None:
    assert [summary.num_ok for summary in night(file=folder / "night.toml")] == [12, 12, 12]
    assert [adapter for _, adapter in loads] == [None]
    found = {name: answers(nights, name) for name in ("plain", "one", "two")}
    assert found["plain"] != found["one"] != found["two"] != found["plain"]
    assert nights.sql("select config->>'$.workload.adapter' from runs where workload = 'two'") == [
        (str(folder / "second"),)
    ]
    assert [summary.num_rows for summary in night(file=folder / "night.toml")] == [0, 0, 0]

    nights.run(str(folder / "two.toml"), adapter=folder / "second", full=True)
    assert answers(nights, "two") == found["two"], "alone, merged at loading"
    assert len(loads) == 2


def test_an_adapter_is_part_of_the_content_key(nights: Any, folder: Path, prefect_server: str) -> None:
    two = str(folder / "two.toml")
    assert nights.run(two, adapter=folder / "first")[0].num_rows == 12
    save_adapter(nights.model, folder / "first", seed=9)
    assert nights.run(two, adapter=folder / "first")[0].num_rows == 12
    assert nights.run(two)[0].num_rows == 12


def test_questions_asked_with_an_adapter_are_not_asked_again_if_they_could_not_be_written(
    nights: Any, folder: Path, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "facets.toml"
    question = '[questions]\nkind = { type = "BOOLEAN", ask = "Is it kind?" }\n[output]\ntable = "facets"\n'
    text = WORKLOAD.format(name="facets", adapter="").replace('mode = "generate"', 'mode = "decide"')
    file.write_text(text.partition("[decoding]")[0] + question)

    def write(run: Any, workload: Any) -> None:
        raise DatabaseError("locked")

    monkeypatch.setattr(workload_run, "write", write)
    with pytest.raises(DatabaseError, match=r"^locked; the answers stay in "):
        nights.run(str(file), adapter=folder / "first")
    monkeypatch.undo()
    (summary,) = nights.run(str(file), adapter=folder / "first")
    assert (summary.num_rows, summary.num_already_done) == (0, 12)


def test_a_wrong_adapter_is_found_before_any_work(nights: Any, folder: Path, tiny_checkpoint: Any) -> None:
    save_adapter(tiny_checkpoint("mistral"), folder / "second")
    with pytest.raises(ModelError, match=r"/second': .*, the model has .*, it was made for"):
        nights.run(str(folder / "two.toml"), adapter=folder / "second")
    with pytest.raises(ConfigError, match=r"workload 'two' with model .*/second': .*, the model has"):
        night(file=folder / "night.toml")
    assert not list(nights.runs.glob("*-two-*"))
    file = folder / "night.toml"
    file.write_text(file.read_text().replace('"one.toml"', '"one.toml"\nadapter = "first"'))
    with pytest.raises(ConfigError, match=r"workload 'one' names an adapter in one\.toml; it may not have another"):
        load_night(file)


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        ('"~no-such-user/x"', "~no-such-user/x': the folder holds no adapter_config"),
        ("3", "must be the path of a folder, got 3"),
        ('"nowhere"', "nowhere': the folder holds no adapter_config"),
    ],
)
def test_a_file_that_names_no_adapter_says_so(adapter: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "about.sql").write_text(SQL)
    (tmp_path / "w.toml").write_text(WORKLOAD.format(name="w", adapter=f"adapter = {adapter}"))
    with pytest.raises(BatchloomError, match=f"w.toml: line 6: adapter.*{reason}"):
        load_workload(tmp_path / "w.toml")
