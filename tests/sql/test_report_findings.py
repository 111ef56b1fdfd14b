"""What a report page says of a run: findings, main numbers, stages, and the prediction beside what came."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tasks.report_page.findings import find_remarkable, key_figures
from tasks.report_page.page import render_report
from tasks.report_page.pictures import find_savings, find_stages
from tests.sql.report_facts import CONFIG, read_facts


def test_what_a_stopped_run_computed_for_open_rows_is_not_called_computed_twice(
    night: Any, make_run: Callable[..., str]
) -> None:
    """Two long prompts were in flight; of a completed run, the same steps are computed again."""
    run_id = make_run([(0, 0, 0, 10.0)], num_suffix_tokens=4_040)
    for num_open, named in ((0, True), (2, False)):
        night.sql(
            "update runs set num_ok = 1, num_unanswered = ?, num_prompt_tokens = 300, num_cached_tokens = 0",
            [num_open],
        )
        facts = read_facts(night, run_id)
        (limit,) = (against for name, _, against in key_figures(facts) if name == "prompt tokens saved")
        assert ("with what was computed twice" in limit) is named
        (computed,) = (each.value for each in find_savings(facts) if each.name == "computed")
        assert computed == (4_040 if named else 300)


def test_only_a_whole_run_is_compared_with_its_prediction(night: Any, make_run: Callable[..., str]) -> None:
    """A run that failed after two of a thousand steps; a deadline is part of the prediction."""
    prediction = {"num_steps": 1000, "num_partitions": 9, "num_simulated_partitions": 9, "num_begun_partitions": 1}
    run_id = make_run([(0, 40, 0, 10.0), (0, 40, 0, 10.0)], config={**CONFIG, "prediction": prediction})
    for status, num_open, is_shown in (("completed", 0, True), ("failed", 2, False), ("deadline", 2, True)):
        night.sql("update runs set status = ?, error = 'Error: it broke', num_unanswered = ?", [status, num_open])
        facts = read_facts(night, run_id)
        page = render_report(facts)
        assert ('id="prediction"' in page) is is_shown
        begun = re.search(r"partitions begun by then(<[^>]*>)+1(<[^>]*>)+1(<[^>]*>)+1.00<", page)
        assert (begun is not None) is (status == "deadline")
        ended = {"failed": "failed", "deadline": "ended by its deadline"}.get(status, f"was {status}")
        assert f"The run {ended}: Error: it broke." in find_remarkable(facts)


def test_engines_that_got_nothing_are_named(night: Any, make_run: Callable[..., str]) -> None:
    """A run notes how many there are; its steps are only of those that had work."""
    for num_engines, idle in ((1, False), (8, True)):
        run_id = make_run([(0, 40, 0, 10_000.0)], config={**CONFIG, "prediction": {"num_engines": num_engines}})
        found = find_remarkable(read_facts(night, run_id))
        assert any("The 8 engines had nothing to do for 70.0 s together" in each for each in found) is idle


def test_a_killed_process_spent_the_time_of_its_steps_in_infer(night: Any, make_run: Callable[..., str]) -> None:
    run_id = make_run([(0, 40, 0, 10_000.0)])
    night.sql(
        "update runs set read_seconds = 1, tokenize_seconds = null, plan_seconds = 1, infer_seconds = null,"
        " write_seconds = null, finished_at = started_at + interval 13 seconds"
    )
    stages = [(each.name, each.value) for each in find_stages(read_facts(night, run_id))]
    assert stages == [("read", 1), ("plan", 1), ("infer", 10), ("between stages", 1)]


@pytest.mark.parametrize(("num_rows", "is_said"), [(1, False), (9, False), (10, True)])
def test_a_template_is_not_blamed_for_a_few_rows(
    night: Any, make_run: Callable[..., str], num_rows: int, is_said: bool
) -> None:
    run_id = make_run([(0, 40, 0, 10.0)])
    night.sql("update runs set num_ok = ?, num_prompt_tokens = 300, best_token_saving_ratio = 0", [num_rows])
    found = find_remarkable(read_facts(night, run_id))
    assert any("The prompts share few beginnings" in each for each in found) is is_said
