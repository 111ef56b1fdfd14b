"""Plans and predicts a step before the night, to choose the rows that fit before the deadline."""

import tempfile
from pathlib import Path

from flows.prediction import read_and_plan
from flows.workload_run import Night, begin_run
from tasks.forecast.load_time import find_speed_ratio
from tasks.forecast.prediction import predict_run
from tasks.layouts.settle import settle_layouts
from tasks.nights.allotment import Portion, list_portions
from tasks.read import read_answer_length
from tasks.storage.plan_file import read_plan_summary
from tasks.workloads.workload import Workload


def foresee(night: Night, workload: Workload) -> list[Portion]:
    """The partitions of a step that is answered alone, with their predicted times; none if prompts are not grouped.

    Tokens stay in the database's cache, so the step does not make them again.

    Raises:
        the error of the stage or of the prediction that failed.
    """
    source = night.source
    if source.method == "none":
        return []
    with tempfile.TemporaryDirectory(prefix="batchloom-foresight-") as folder:
        (workload,) = settle_layouts(source, [workload.bind(source.checkpoint)], is_kept=False)
        run = begin_run(night, workload, Path(folder))
        _, plan = read_and_plan(source, workload, run)
        if plan is None or not (summary := read_plan_summary(plan)).num_rows:
            return []
        length = read_answer_length(source.database, workload)
        job = night.make_job(workload, run, plan, length.expected_output_tokens)
        team = night.workers.count(night.engine)
        ratio = find_speed_ratio(source.database, source.model_digest, night.engine)
        found = predict_run(job, summary, max(1, round(length.num_tokens)), team, None, ratio)
        return list_portions(workload.name, plan, summary, found["step_seconds"] / team.num_engines)
