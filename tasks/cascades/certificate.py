"""Certificates: the agreement that a sample shows for a cascade, kept in the table ``certificates``."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.cascades.bound import choose_threshold
from tasks.cascades.cascade import Cascade, find_answer_columns
from tasks.cascades.row_choice import RowChoice, take_answers
from tasks.database.connection import connect, execute, restrict_sql, transaction
from tasks.storage.artifact import runs_folder
from tasks.workloads.workload import Workload


@task(name="certify", retries=0, cache_policy=NO_CACHE, persist_result=False)
def certify(
    database: str, workload: Workload, cascade: Cascade, model_digests: tuple[str, str], attach: Mapping[str, str]
) -> tuple[float | None, str]:
    """Choose a cascade's threshold by the rows that both models have answered, and keep the certificate, under the
    workload's name. The same answers give the same certificate, which is kept once. Returns the threshold, see
    `TestedThreshold`, and the certificate as one line.

    Args:
        cascade: with a target.
        model_digests: of the first model, and of the model that answers unsure rows.
        attach: what the workload's query may read beside the database.
    Raises:
        DatabaseError: the database is locked, or the query does not run any more.
    """
    assert cascade.target_agreement is not None
    first, second = model_digests
    choice = RowChoice(role="sample", model_digest=first, num_sampled=cascade.num_sampled)
    with connect(database) as connection:
        restrict_sql(connection, [runs_folder(database)], attach, [workload.requests_sql])
        choice.prepare(connection, workload)
        take_answers(connection, workload, second, "batchloom_second_answers")
        answers = {"answers": list(find_answer_columns(workload))}
        sample = execute(connection, "cascade/compared_rows", answers, keys=workload.key).fetchall()
        ((num_rows,),) = execute(connection, "cascade/count_sent_rows", {"threshold": None}).fetchall()
        found = choose_threshold(
            [(row[1], row[2]) for row in sample], num_rows, cascade.target_agreement, cascade.confidence
        )
        threshold = {"threshold": found.threshold}
        ((num_sent,),) = execute(connection, "cascade/count_sent_rows", threshold).fetchall()
        is_small = found.num_acceptable is None or len(sample) == num_rows
        too_small = f"a sample of {len(sample):,} of {num_rows:,} rows is too small for the bound"
        reason = too_small if is_small else "even the surest answers differ too often"
        facts: dict[str, Any] = {
            "workload": workload.name,
            "workload_digest": workload.digest,
            "first_model_digest": first,
            "second_model_digest": second,
            "target_agreement": cascade.target_agreement,
            "confidence": cascade.confidence,
            "num_rows": num_rows,
            "num_sampled": len(sample),
            "num_agreed": sum(is_same for _, _, is_same in sample),
            "num_sent": num_sent,
            **asdict(found),
            "reason": "" if found.threshold is not None else reason,
        }
        content = json.dumps([facts, sample], sort_keys=True).encode()
        certificate = facts | {
            "certificate_id": hashlib.sha256(content).hexdigest(),
            "sample_agreement": 1 - found.num_disagreed / len(sample) if sample else None,
            "reason": facts["reason"] or None,
            "sample": [dict(zip(("request_key", "confidence", "is_same"), row, strict=True)) for row in sample] or None,
            "created_at": datetime.now(UTC),
        }
        with transaction(connection):
            execute(connection, "cascade/create_certificates")
            execute(connection, "cascade/insert_certificate", {"certificate": certificate})
    return found.threshold, _describe(facts)


def _describe(facts: Mapping[str, Any]) -> str:
    agreed = f"both models agree in {facts['num_agreed']:,} of {facts['num_sampled']:,} sampled rows"
    if facts["threshold"] is None:
        return f"{agreed}; {facts['reason']}: all {facts['num_rows']:,} rows go to the large model"
    return (
        f"{agreed}; {facts['num_sent']:,} of {facts['num_rows']:,} rows, of probabilities below "
        f"{facts['threshold']:.4g}, go to the large model; with confidence {facts['confidence']:g} at least "
        f"{facts['target_agreement']:g} of the rows outside the sample have its answer then"
    )
