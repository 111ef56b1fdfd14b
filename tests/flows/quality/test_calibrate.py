"""The calibrate flow on the answers of a real night: the map is said, kept and applied; too few rows are refused."""

from pathlib import Path
from typing import Any

import pytest

from flows.command.run_flow import run_flow
from flows.quality.calibrate import calibrate
from tests.adapters import save_adapter

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.mark.parametrize("has_adapter", [False, True])
def test_answers_of_a_night_are_calibrated(
    nights: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, *, has_adapter: bool
) -> None:
    adapter = save_adapter(nights.model, tmp_path / "adapter") if has_adapter else None
    nights.add_towers(20)
    nights.sql("insert into ranking_candidates select query_id, doc_id from snippet_requests where doc_id like 'm%'")
    nights.run("ranking", adapter=adapter)
    nights.sql(
        "create table gold as select query_id, doc_id,"
        " if(score > (select median(score) from latest_rankings), 'yes', 'no') as label from latest_rankings"
    )
    nights.sql("update gold set label = if(label = 'yes', 'no', 'yes') where hash(doc_id, query_id) % 5 = 0")
    options = ["--database", str(nights.path), "--workload", "ranking", "--gold", "gold"]
    assert run_flow(calibrate, options) == 0
    assert "ranking: score: platt on 66 gold rows: mean squared error" in capsys.readouterr().out
    ((num_rows, num_calibrated, is_rising),) = nights.sql(
        "select count(*), count(calibrated_probability), corr(rank_of, calibrated_rank) > 0.999 from ("
        " select *, rank() over (order by probability) as rank_of,"
        " rank() over (order by calibrated_probability) as calibrated_rank from calibrated_rankings)"
    )
    assert (num_rows, num_calibrated, is_rising) == (66, 66, True)

    nights.sql("delete from gold where doc_id like 'm1%'")
    assert run_flow(calibrate, options) == 1
    assert "a calibration needs at least 50" in capsys.readouterr().err
