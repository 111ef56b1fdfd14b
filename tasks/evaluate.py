"""Evaluates the answers of a workload, as a Prefect task."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.evaluation.evaluation import Evaluation, evaluate_answers
from tasks.workloads.workload import Workload


@task(name="evaluate", retries=0, cache_policy=NO_CACHE, persist_result=False)
def evaluate(
    database: str, workload: Workload, gold: str | None, run: str | None, against: str | None, k: int
) -> Evaluation:
    """See `evaluate_answers`."""
    return evaluate_answers(database, workload, gold, run_id=run, against=against, k=k)
