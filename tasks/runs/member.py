"""A workload of a plan that holds rows of several workloads."""

from dataclasses import dataclass

from tasks.workloads.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One of the workloads whose rows are in one plan.

    Attributes:
        run_folder: of the workload's run, for its parts and step records.
        first_row_id: row id of its first row in the plan; the next member's rows follow its own.
        expected_output_tokens: of an answer, see `AnswerLength`.
    """

    run_folder: str
    workload: Workload
    first_row_id: int
    expected_output_tokens: int | None
