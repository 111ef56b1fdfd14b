"""Cascades: a small model scores every row, a large one answers those of which it is unsure, once per model."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from flows.cli import batchloom
from flows.nights.night import night
from flows.nights.night_file import load_night
from tests.flows.nights.night_text import night_text
from tests.tiny_encoders import save_encoder

pytestmark = pytest.mark.usefixtures("prefect_server")

SCORE = """
name = "{name}"
mode = "score"
requests_sql = "about.sql"
key = ["doc_id", "query_id"]
labels = ["h", "0", "2"]
[prompt]
chat = false
template = "{{body}} -- {name} {{query_text}}"
[output]
table = "{name}"
"""

DECIDE = """
name = "moods"
mode = "decide"
requests_sql = "about.sql"
key = ["doc_id", "query_id"]
[prompt]
chat = false
template = "{body} -- {query_text}"
[questions]
kind = { type = "BOOLEAN", ask = "Is it kind?" }
mood = { type = "ENUM('good', 'bad', 'none')", ask = "Which mood?" }
[output]
table = "moods"
"""

SQL = """
select documents.doc_id, queries.query_id, documents.body, queries.query_text
from documents
cross join queries
"""


@pytest.fixture(scope="session")
def like_llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that mostly agrees with the tiny Llama: its weights with noise."""
    return copy_with_noise(tiny_llama, tmp_path_factory.mktemp("models") / "like-llama", 0.003)


def copy_with_noise(checkpoint: Path, folder: Path, deviation: float) -> Path:
    """Copy a checkpoint and add noise to its weights; gives the folder."""
    shutil.copytree(checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(3)
    noisy = {name: each + deviation * torch.randn(each.shape, generator=noise) for name, each in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def write_night(nights: Any, tiny_llama: Path, like_llama: Path) -> Any:
    """Write a night of workloads with the keys of a cascade each, or none for the large model alone; gives its file."""
    large = nights.path.parent / "large"
    large.symlink_to(tiny_llama)

    def write(**cascades: str) -> Path:
        folder = nights.path.parent
        (folder / "about.sql").write_text(SQL)
        text = night_text({"small": like_llama, "large": large}, max_num_batched_tokens=512)
        for name, cascade in cascades.items():
            (folder / f"{name}.toml").write_text(DECIDE if name == "moods" else SCORE.format(name=name))
            text += f'[[workload]]\nfile = "{name}.toml"\n'
            text += f'model = "small"\ncascade = {{ to = "large", {cascade} }}\n' if cascade else 'model = "large"\n'
        (folder / "night.toml").write_text(text)
        return Path(folder / "night.toml")

    return write


def count_answers(nights: Any, table: str) -> list[int]:
    """How many rows the small and the large model have written, errors included; none may be written twice."""
    rows = nights.sql(f"select model, count(*), count(distinct (doc_id, query_id)) from {table} group by 1")
    assert all(num_rows == num_keys for _, num_rows, num_keys in rows), "a model has answered a row twice"
    by_model = {Path(model).name: num_rows for model, num_rows, _ in rows}
    return [by_model.get(name, 0) for name in ("like-llama", "large")]


def test_unsure_rows_are_answered_by_the_large_model(nights: Any, write_night: Any) -> None:
    night(file=write_night(urgent="below = 0.000001"))
    assert count_answers(nights, "urgent") == [12, 0]
    keyed = "select doc_id || query_id, exp(list_max(label_logprobs)) from {} where model like '%like-llama'"
    confidences = dict(nights.sql(keyed.format("urgent")))
    below = sorted(confidences.values())[5]
    file = write_night(urgent=f"below = {below!r}", angry="below = 1.0")
    found = {summary.workload: summary for summary in night(file=file)}
    assert list(found) == ["urgent", "angry", "urgent-large", "angry-large"]
    assert [(one.num_ok, one.num_already_done) for one in found.values()] == [(0, 12), (12, 0), (5, 0), (12, 0)]
    assert count_answers(nights, "urgent") == [12, 5]
    unsure = {key for key, confidence in confidences.items() if confidence < below}
    answered = nights.sql("select doc_id || query_id, model like '%/large' from latest_urgent where status = 'ok'")
    assert dict(answered) == {key: key in unsure for key in confidences}
    together = "select distinct shared_with is not null from runs where workload like '%-large' and num_rows > 0"
    assert nights.sql(together) == [(True,)], "the unsure rows of both are one batch"

    assert sum(summary.num_rows for summary in night(file=file)) == 0
    nights.sql("insert into queries values ('q9', 'who is it?')")
    nights.sql("update documents set body = 'Nobody.' where doc_id = 'd0'")
    found = {summary.workload: summary for summary in night(file=file)}
    assert (found["urgent"].num_ok, found["angry-large"].num_ok) == (7, 7), "four questions of d0, one of the others"
    newest = (
        "select doc_id, query_id, status, model like '%/large', exp(list_max(label_logprobs)) < ? from latest_urgent"
    )
    rows = nights.sql(newest, [below])
    assert len(rows) == 16
    assert all(status == "ok" and (is_large or not is_unsure) for _, _, status, is_large, is_unsure in rows)
    num_small, num_large = (found["urgent"].num_ok, found["urgent-large"].num_ok)
    assert nights.sql("select count(*) from urgent") == [(17 + num_small + num_large,)]


def test_a_sample_of_a_cascade_is_of_the_rows_that_the_small_model_has_left(
    nights: Any, write_night: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that the large model has answered after it count as the small model's, too."""
    file = write_night(urgent="below = 1.0")
    night(file=file)
    nights.sql("insert into queries values ('q9', 'who is it?')")
    with caplog.at_level("INFO", "batchloom"):
        assert night(file=file, sample=3) == []
    assert "urgent: 3 of 4 rows answered as a sample" in caplog.text
    assert "no sample of steps whose rows depend on others: urgent-large" in caplog.text
    assert count_answers(nights, "urgent") == [12, 12]


def test_rows_that_the_small_model_cannot_read_go_to_the_large_one(
    nights: Any, write_night: Any, like_llama: Path
) -> None:
    """The small model's context is too short for one document; no model answers a query without text."""
    file = write_night(moods="below = 0.000001")
    file.write_text(file.read_text().replace("[models.large]", "max_model_len = 90\n[models.large]"))
    nights.sql("insert into queries values ('q-empty', '')")
    small, large = night(file=file)
    assert 0 < small.num_errors < 16
    assert (small.num_ok + small.num_errors, large.num_ok, large.num_errors) == (16, small.num_errors - 4, 4)
    assert sum(summary.num_rows for summary in night(file=file)) == 0
    assert nights.sql("select query_id, count(*) from latest_moods where status = 'error' group by 1") == [
        ("q-empty", 4)
    ]


def test_a_sample_that_is_too_small_sends_all_rows(
    nights: Any, write_night: Any, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_night(moods="target_agreement = 0.9")
    with caplog.at_level("INFO", "batchloom"):
        found = {summary.workload: summary for summary in night(file=file)}
    assert {name: one.num_ok for name, one in found.items()} == {
        "moods": 12,
        "moods-large-sample": 12,
        "moods-large": 0,
    }
    assert "a sample of 12 of 12 rows is too small for the bound: all 12 rows go to the large model" in caplog.text
    night(file=file)
    kept = (
        "select workload, num_rows, num_sampled, threshold, reason, len(sample), target_agreement, confidence"
        " from certificates"
    )
    reason = "a sample of 12 of 12 rows is too small for the bound"
    assert nights.sql(kept) == [("moods", 12, 12, None, reason, 12, 0.9, 0.95)], "kept once"


def test_the_certified_agreement_is_met_outside_the_sample(nights: Any, write_night: Any) -> None:
    """Of two real models, of which the small one is a noisy copy; the large one answers all rows for comparison."""
    nights.sql("insert into queries select 'x' || i, 'is it number ' || i || '?' from range(97) as numbers (i)")
    file = write_night(urgent="target_agreement = 0.9, sample = 120")
    found = {summary.workload: summary for summary in night(file=file)}
    (row,) = nights.sql(
        "select threshold, num_rows, num_sampled, num_allowed, num_disagreed, num_acceptable, num_agreed, num_sent,"
        " sample_agreement, first_model_digest <> second_model_digest, workload_digest from certificates"
    )
    threshold, num_rows, num_sampled, num_allowed, num_disagreed, num_acceptable, num_agreed, num_sent, *rest = row
    assert (num_rows, num_sampled, num_allowed) == (400, 120, 28)
    assert 0 <= num_disagreed <= num_acceptable < 0.1 * 120
    assert num_agreed < 120, "the models must differ somewhere, else this shows nothing"
    assert 0 < threshold < 1
    assert 0 < num_sent < 280
    assert rest[:2] == [1 - num_disagreed / 120, True]
    assert found["urgent-large-sample"].num_ok == 120
    assert found["urgent-large"].num_ok + found["urgent-large"].num_already_done == num_sent

    nights.sql("create table cascaded as select * from latest_urgent; drop table urgent cascade")
    night(file=write_night(urgent=""))
    (outside,) = nights.sql(
        "with sampled as (select unnest(sample) as entry from certificates)"
        " select count(*), count(*) filter (cascaded.label = latest_urgent.label), count(*) filter (cascaded.model like"
        " '%like-llama') from cascaded join latest_urgent using (doc_id, query_id)"
        " where [doc_id, query_id] not in (select entry.request_key from sampled)"
    )
    num_outside, num_same, num_small = outside
    assert num_outside == 280
    assert num_small > 80, "most of the rows are spared the large model"
    assert num_same >= 0.9 * num_outside
    assert num_outside - num_same <= num_allowed


@pytest.mark.parametrize(
    ("cascade", "message"),
    [
        ('to = "huge", below = 0.5', "'urgent': cascade: to names model 'huge', which is none of small, large"),
        ('to = "small", below = 0.5', "the cascade leads to 'small', the workload's own model"),
        ('to = "large"', "must have either below or target_agreement"),
        ('to = "large", below = 0.5, target_agreement = 0.9', "must have either below or target_agreement"),
        ('to = "large", below = 0.5, sample = 9', "sample and confidence belong to target_agreement"),
        ('to = "large", below = 50', r"\[workload 1.cascade\]: below: input should be less than or equal to 1, got 50"),
        ('to = "large", target_agreement = 0.95, sample = 58', "agreement of 0.95 with confidence 0.95; 59 rows are"),
    ],
)
def test_what_is_no_cascade(write_night: Any, cascade: str, message: str) -> None:
    file = write_night(urgent="below = 0.5")
    file.write_text(file.read_text().replace('to = "large", below = 0.5', cascade))
    with pytest.raises(ConfigError, match=message):
        load_night(file)


@pytest.mark.parametrize("name", ["{}", "{}/", "{}/../{}", "link"])
def test_a_model_under_two_names_has_no_cascade(write_night: Any, name: str) -> None:
    """Rows that it has answered would count as those of the large model."""
    file = write_night(urgent="below = 0.5")
    (small, large) = re.findall(r'path = "(.+)"', file.read_text())
    (file.parent / "link").symlink_to(small)
    other = name.replace("{}", small, 1).replace("{}", Path(small).name)
    file.write_text(file.read_text().replace(large, other))
    with pytest.raises(ConfigError, match="'urgent': cascade: models 'small' and 'large' have the same path"):
        load_night(file)


def test_two_copies_of_a_model_have_no_cascade(write_night: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_night(urgent="below = 0.5")
    (small, large) = re.findall(r'path = "(.+)"', file.read_text())
    shutil.copytree(small, file.parent / "copy")
    file.write_text(file.read_text().replace(large, str(file.parent / "copy")))
    message = "workload 'urgent': cascade: models 'small' and 'large' are copies of one model"
    with pytest.raises(ConfigError, match=message):
        night(file=file)
    assert batchloom(["check", str(file)]) == 1
    assert capsys.readouterr().err == f"check: {message}\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('type = "BOOLEAN"', 'type = "SCORE(1, 5)"'), "'kind' is an expectation, which has no probability"),
        (('mode = "decide"', 'mode = "generate"'), "answers of mode 'generate' have no probability"),
    ],
)
def test_answers_without_probabilities_have_no_cascade(write_night: Any, change: tuple[str, str], message: str) -> None:
    file = write_night(moods="below = 0.5")
    text = DECIDE.replace(*change)
    if "generate" in text:
        text = text[: text.index("[questions]")] + '[output]\ntable = "moods"\nanswer_column = "mood"\n'
    (file.parent / "moods.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_night(file)


RERANK = """
name = "reranking"
mode = "score"
labels = "checkpoint"
requests_sql = "about.sql"
key = ["doc_id", "query_id"]
pair = "{body}"
[prompt]
template = "{query_text}"
[output]
table = "reranking"
"""


def test_rerankers_are_compared_by_the_rows_that_both_have_scored(nights: Any, tmp_path: Path) -> None:
    large = save_encoder("bert", tmp_path / "large", num_classes=3)
    small = copy_with_noise(large, tmp_path / "small", 0.01)
    nights.sql("insert into queries select 'x' || i, 'is it number ' || i || '?' from range(47) as numbers (i)")
    (tmp_path / "about.sql").write_text(SQL)
    (tmp_path / "reranking.toml").write_text(RERANK)
    file = tmp_path / "night.toml"
    file.write_text(
        f'''database = "{nights.path}"
[models]
small = {{ path = "{small}", dtype = "float32" }}
large = {{ path = "{large}", dtype = "float32" }}
[[workload]]
file = "reranking.toml"
model = "small"
cascade = {{ to = "large", target_agreement = 0.8, sample = 100 }}
'''
    )
    found = {summary.workload: summary for summary in night(file=file)}
    assert (found["reranking"].num_ok, found["reranking-large-sample"].num_ok) == (200, 100)
    same = (
        "with sampled as (select unnest(sample) as entry from certificates)"
        " select count(*), count(*) filter (small.label = large.label)"
        " from reranking as small join reranking as large using (doc_id, query_id)"
        " where small.model like '%/small' and large.model like '%/large'"
        " and [doc_id, query_id] in (select entry.request_key from sampled)"
    )
    ((num_sampled, num_agreed),) = nights.sql(same)
    assert nights.sql("select num_sampled, num_agreed from certificates") == [(num_sampled, num_agreed)]
    assert (num_sampled, num_agreed > 80, num_agreed < 100) == (100, True, True)
    assert found["reranking-large"].num_ok == 0, "the models agree often enough"
