"""Keys may be called as anything that a statement names itself: a CTE, an alias, the variable of a lambda."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tasks.answers.reserved_names import RESERVED_COLUMNS
from tasks.evaluation.evaluation import evaluate_answers
from tasks.workloads.workload import load_workload

SQL = Path(__file__).parents[2] / "sql"
NAMING = (r"\bas '?([a-z_]+)", r"^(?:with )?([a-z_]+)(?: \(.*?\))? as \(", r"\blambda ([a-z]+)")
MODES = {
    "generate": ("reply", 'mode = "generate"', 'answer_column = "reply"'),
    "score": ("label", 'mode = "score"\nlabels = ["yes", "no"]', 'rank_within = "listed"'),
    "extract": ("reply", 'mode = "extract"', '[columns]\nreply = "VARCHAR"'),
}


def list_names(answers: set[str]) -> list[str]:
    """Whatever the statements name, and names that begin as theirs do; less the names that a key may not have."""
    texts = [path.read_text() for path in SQL.rglob("*.sql") if path.parent.name != "demo"]
    found = {name for text in texts for how in NAMING for name in re.findall(how, text, re.MULTILINE)}
    found |= {f"{name}0" for name in found if name.endswith("_")}
    assert {"newest", "texts", "listed", "asked", "pair", "answer_0"} < found
    return sorted(found - set(RESERVED_COLUMNS) - answers)


@pytest.mark.parametrize("mode", MODES)
def test_keys_may_have_the_names_that_statements_use(night: Any, tmp_path: Path, mode: str) -> None:
    """All of them at once: written, shown as newest and as failed, not asked again, and evaluated."""
    answer, head, output = MODES[mode]
    keys = list_names({"reply", "score", "rank", "label", "label_logprobs"})
    (tmp_path / "all.toml").write_text(
        f'name = "all"\nrequests_sql = "all.sql"\nkey = {json.dumps(keys)}\n{head}\n'
        f'[prompt]\ntemplate = "{{mail_body}}"\n[output]\ntable = "mail_answers"\n{output}\n'
    )
    (tmp_path / "all.sql").write_text("select * from mails")
    columns = ", ".join(f"""'{name} ' || i as "{name}\"""" for name in keys)
    night.sql(f"create table mails as select {columns}, if(i < 3, 'mail', null) as mail_body from range(4) as t (i)")
    workload, given = load_workload(tmp_path / "all.toml"), {
        "generate": {"answer": "yes", "finish_reason": "eos"},
        "score": {"score": 0.5, "label": "yes", "label_logprobs": [-0.5, -0.5], "finish_reason": "scored"},
        "extract": {"answer": '{"reply": "yes"}', "finish_reason": "eos"},
    }[mode]  # fmt: skip
    night.run(workload, lambda row: given)
    names = ", ".join(f'"{name}"' for name in keys)
    mails = night.sql(f"select {names} from mails order by all")
    assert night.sql(f"select {names} from latest_mail_answers order by all") == mails
    assert night.sql(f"select {answer}, status from latest_mail_answers order by all") == [
        *[("yes", "ok")] * 3,
        (None, "error"),
    ]
    assert night.sql(f"select {names}, error from failed_mail_answers") == [(*mails[3], "mail_body is NULL")]
    assert night.prepare(workload).read.num_selected == 0
    night.sql("delete from mails where newest = 'newest 1'")
    assert night.sql(f"select {names} from latest_mail_answers order by all") == [mails[0], *mails[2:]]
    night.sql(f"create table gold as select {names}, 'yes' as {answer} from mails where mail_body is not null")
    evaluation = evaluate_answers.fn(night.path, workload, "gold")
    assert (evaluation.num_gold_rows, evaluation.num_ok) == (2, 2)
    right = {each.value for each in evaluation.metrics if each.metric in ("accuracy", "exact_match")}
    assert right == {1.0}
