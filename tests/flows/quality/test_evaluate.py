"""The evaluate flow on a real night: exit codes, what is kept, the run's page, Prefect's artifact."""

import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from engine.errors import DatabaseError, ModelError
from flows.command.run_flow import run_flow
from flows.quality.calibrate import calibrate
from flows.quality.evaluate import evaluate
from tasks.database import connection
from tests.tiny_encoders import save_encoder

pytestmark = pytest.mark.usefixtures("prefect_server")


def test_answers_are_judged_and_a_bad_metric_is_an_exit_code(nights: Any, capsys: pytest.CaptureFixture[str]) -> None:
    nights.run("ranking")
    nights.sql("create table gold as select query_id, doc_id, label from latest_rankings")
    nights.sql("update gold set label = case label when 'yes' then 'no' else 'yes' end where doc_id = 'd0'")
    ((num_wrong,),) = nights.sql("select count(*) from gold where doc_id = 'd0'")
    share_right = 1 - num_wrong / 6
    options = ["--database", str(nights.path), "--workload", "ranking", "--gold", "gold"]
    assert run_flow(evaluate, [*options, "--min", "accuracy=0.1", "--min", "label.coverage=1"]) == 0
    printed = capsys.readouterr()
    assert "ranking: newest answers against gold table gold" in printed.out
    (line,) = [line.split() for line in printed.out.splitlines() if "accuracy" in line]
    assert line[:3] == ["label", "accuracy", f"{share_right:.3f}"]
    assert run_flow(evaluate, [*options, "--min", "accuracy=0.99", "--max", "mrr=0.001"]) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"evaluate: accuracy in label is {share_right:.6g}, below 0.99; mrr in rank is ")
    assert message.count("\n") == 1
    assert nights.sql("select count(*), count(distinct evaluation_id) from evaluations") == [(2, 2)]
    ((value, low, high),) = nights.sql(
        "select value, low, high from latest_evaluation_metrics where metric = 'accuracy' and reference = 'gold'"
    )
    assert value == pytest.approx(share_right)
    assert low < value < high

    ((run_id,),) = nights.sql("select run_id from runs")
    page = (nights.runs / run_id / "report.html").read_text()
    for part in ('id="metrics"', "Reliability of score", "Confusion of label", "label: accuracy"):
        assert part in page, part
    with get_client(sync_client=True) as client:
        (artifact, *_) = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["evaluation-ranking"]))
        )
    assert "accuracy" in str(artifact.data)

    for wrong, line in {
        ("--gold", "none"): "gold 'none': no table or view 'none'",
        ("--min", "accuracy"): "--min 'accuracy' is not of the form [COLUMN.]METRIC[.LABEL]=NUMBER",
        ("--workload", "nonsense"): "no workload 'nonsense'",
    }.items():
        assert run_flow(evaluate, [*options, *wrong]) == 1
        assert line in capsys.readouterr().err


RERANK = """
name = "reranking"
mode = "score"
labels = "checkpoint"
score_label = "LABEL_2"
requests_sql = "select_ranking_requests.sql"
key = ["query_id", "doc_id"]
pair = "{body}"
[prompt]
template = "{query_text}"
[output]
table = "reranked"
rank_within = "query_id"
"""


def test_a_reranker_is_judged_by_the_labels_of_its_model(nights: Any, tmp_path: Path) -> None:
    nights.model = save_encoder("bert", tmp_path / "model", num_classes=3)
    (tmp_path / "reranking.toml").write_text(RERANK)
    options = {"database": nights.path, "workload": str(tmp_path / "reranking.toml"), "gold": "gold"}
    nights.run(options["workload"])
    nights.sql(
        "create table gold as select query_id, doc_id, 'LABEL_' || row_number() over (order by doc_id) % 3 as label"
        " from latest_reranked"
    )
    found = {(each.column_name, each.metric): each.value for each in evaluate(**options).metrics if not each.label}
    rows = nights.sql(
        "select gold.label, answers.label, score, query_id, rank"
        " from gold join latest_reranked as answers using (query_id, doc_id)"
    )
    assert found["label", "accuracy"] == pytest.approx(sum(row[0] == row[1] for row in rows) / 6)
    squares = [(score - (expected == "LABEL_2")) ** 2 for expected, _, score, _, _ in rows]
    assert found["score", "brier_score"] == pytest.approx(sum(squares) / 6)
    first = {query: min(row[4] for row in rows if row[0] == "LABEL_2" and row[3] == query)
             for query in {row[3] for row in rows if row[0] == "LABEL_2"}}  # fmt: skip
    assert found["rank", "mrr"] == pytest.approx(sum(1 / rank for rank in first.values()) / len(first))
    assert ("rank", "ndcg@10") in found

    shutil.move(nights.model, tmp_path / "other")
    with pytest.raises(ModelError, match=re.escape(str(nights.model))):
        evaluate(**options)
    save_encoder("bert", nights.model, num_classes=3, seed=1)
    with pytest.raises(ModelError, match="has changed since it answered workload 'reranking'"):
        evaluate(**options)


@pytest.mark.parametrize("command", [evaluate, calibrate])
def test_every_opening_waits_for_a_lock_as_long_as_the_user_says(
    nights: Any, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.run("ranking")
    nights.sql("create table gold as select query_id, doc_id, label from latest_rankings")
    waits = []

    def open_file(path: Path, *, lock_timeout_seconds: float, **options: Any) -> Any:
        waits.append(lock_timeout_seconds)
        return opened(path, lock_timeout_seconds=lock_timeout_seconds, **options)

    opened = connection._open
    monkeypatch.setattr(connection, "_open", open_file)
    with suppress(DatabaseError):  # too few gold rows for a calibration
        command(database=nights.path, workload="ranking", gold="gold", lock_timeout_seconds=7.5)
    assert len(waits) >= 2
    assert set(waits) == {7.5}


@pytest.mark.parametrize("command", [evaluate, calibrate])
def test_a_database_that_others_read_is_waited_for_as_long_as_the_user_says(nights: Any, command: Any) -> None:
    read = f"import duckdb, sys; c = duckdb.connect({str(nights.path)!r}, read_only=True); print(); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", read], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()  # it has the database open until its standard input ends
        with pytest.raises(DatabaseError, match=rf"locked by process {reader.pid} .*; waited 0\.2 s"):
            command(database=nights.path, workload="ranking", gold="gold", lock_timeout_seconds=0.2)
