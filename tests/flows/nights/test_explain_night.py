"""The forecast of a night file against the night: batches, planned tokens, steps whose rows are not known before."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, DatabaseError
from flows.cli import batchloom
from flows.nights.explain_night import explain_night
from flows.nights.night import night
from tests.flows.nights.night_text import night_text
from tests.tiny_encoders import save_encoder, save_modules

pytestmark = pytest.mark.usefixtures("prefect_server")

STEPS = """
[[workload]]
file = "urgent.toml"
[[workload]]
file = "angry.toml"
[[workload]]
file = "urgent2.toml"
after = ["urgent", "angry"]
"""

WORKLOAD = """
name = "{name}"
mode = "score"
requests_sql = "{name}.sql"
key = ["doc_id"]
labels = ["yes", "no"]
[prompt]
chat = false
template = "{{body}} -- are they {name}?"
[output]
table = "{name}"
"""


@pytest.fixture
def write_night(nights: Any, tiny_llama: Path) -> Any:
    def write(budget: str = "9h", more: str = "") -> Path:
        folder = nights.path.parent
        for name in ("urgent", "angry", "urgent2"):
            (folder / f"{name}.toml").write_text(WORKLOAD.format(name=name))
            source = "latest_urgent join documents using (doc_id)" if name == "urgent2" else "documents"
            (folder / f"{name}.sql").write_text(f"select doc_id, body from {source}")
        file = Path(folder / "night.toml")
        models = night_text({"small": tiny_llama}, block_size=1, max_num_batched_tokens=128)
        file.write_text(f'budget = "{budget}"\n{models}{STEPS}{more}')
        return file

    return write


def test_workloads_that_run_together_are_planned_together(nights: Any, write_night: Any) -> None:
    nights.sql("update documents set body = repeat(body, 4)")
    found = explain_night(write_night())
    (batch,) = found.batches
    urgent, angry = batch.workloads
    assert (urgent.workload, angry.workload, urgent.num_rows, angry.num_rows) == ("urgent", "angry", 4, 4)
    assert urgent.prediction is not None
    assert angry.prediction is not None
    assert max(urgent.prediction.seconds, angry.prediction.seconds) < batch.seconds
    assert batch.seconds < 0.9 * (urgent.prediction.seconds + angry.prediction.seconds)
    assert batch.load_seconds is not None
    assert batch.load_seconds > 0
    assert found.seconds == pytest.approx(batch.seconds + batch.load_seconds)
    assert found.unknown == {"urgent2": "its rows depend on urgent, angry"}
    assert found.seconds_allowed == pytest.approx(0.98 * 9 * 3600)
    assert nights.sql("from runs") == [], "nothing is written"

    night(file=write_night())
    ((num_computed,),) = nights.sql(
        "select sum(num_suffix_tokens + num_prefix_tokens) from steps join runs using (run_id)"
        " where workload = 'urgent'"
    )
    assert batch.num_planned_tokens == num_computed
    (done,) = explain_night(write_night()).batches
    assert (done.seconds, done.load_seconds, done.num_planned_tokens) == (0, 0, 0)
    (again,) = explain_night(write_night(), full=True).batches
    assert again.num_planned_tokens == num_computed
    nights.sql("insert into documents values ('new', 'New', 'They write that it is late.')")
    nights.sql("delete from angry")
    (mixed,) = explain_night(write_night()).batches
    assert [each.num_rows for each in mixed.workloads] == [1, 5]


def test_only_the_first_model_of_a_cascade_is_known(nights: Any, write_night: Any, tiny_checkpoint: Any) -> None:
    """Nor are rows of an encoder simulated."""
    save_modules(save_encoder("bert", nights.path.parent / "encoder"), "pooling_mode_mean_tokens")
    more = (
        f'[models.large]\npath = "{tiny_checkpoint("qwen3")}"\ndtype = "float32"\n[models.encoder]\npath = "encoder"\n'
    )
    file = write_night(more=more)
    text = file.read_text().replace('file = "urgent.toml"\n', 'file = "urgent.toml"\nmodel = "small"\n', 1)
    text = text.replace('file = "angry.toml"\n', 'file = "angry.toml"\nmodel = "encoder"\n')
    text = text.replace('model = "small"\n', 'model = "small"\ncascade = { to = "large", below = 0.8 }\n')
    file.write_text(text.replace('after = ["urgent", "angry"]', 'after = "urgent"\nmodel = "large"'))
    embed = WORKLOAD.format(name="angry").replace('"score"', '"embed"').replace('labels = ["yes", "no"]\n', "")
    (nights.path.parent / "angry.toml").write_text(embed)
    found = explain_night(file, device="h200")
    (batch,) = found.batches
    assert [each.workload for each in batch.workloads] == ["urgent"]
    assert (batch.model, batch.load_seconds) == ("small", None), "how fast another machine loads it is not known"
    assert found.seconds == batch.seconds
    assert found.unknown["urgent-large"] == "its rows depend on urgent"
    assert "urgent2" in found.unknown
    assert found.unknown["angry"].startswith("encoder is an encoder")


def test_the_command_takes_a_night_file(nights: Any, write_night: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write_night(budget="1s"))
    assert batchloom(["explain", file, "--device", "h200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["title"], len(found["batches"])) == ("night.toml", 1)
    assert [each["label"] for each in found["batches"][0]["workloads"]] == ["simulated", "simulated"]
    nights.sql(
        "insert into documents select 'x' || i, 'House', repeat('House ' || i || '. ', 50) from range(2000) t (i)"
    )
    assert batchloom(["explain", file]) == 0
    page = capsys.readouterr().out
    assert "urgent + " in page
    assert "which does not fit before its deadline" in page
    assert "- urgent2 is not simulated: its rows depend on urgent, angry." in page
    assert batchloom(["explain", file, "--workers", "2"]) == 2
    assert "--workers does not go with a night file" in capsys.readouterr().err
    assert batchloom(["explain", "--full", file]) == 2
    assert "a night file comes before the options: batchloom explain" in capsys.readouterr().err


def test_what_cannot_be_explained_is_refused(nights: Any, write_night: Any) -> None:
    with pytest.raises(ConfigError, match="no device 'h900'"):
        explain_night(write_night(), device="h900")
    (file := write_night()).with_name("angry.sql").write_text("select doc_id, body from gone")
    with pytest.raises(DatabaseError, match="gone"):
        explain_night(file)
    nights.path.rename(nights.path.with_name("away.duckdb"))
    with pytest.raises(DatabaseError, match="no such file"):
        explain_night(write_night())
