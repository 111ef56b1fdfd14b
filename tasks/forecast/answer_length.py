"""How long a workload's answers will probably be: as long as its earlier ones."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from sql import statement
from tasks.database.connection import connect, fill_identifiers
from tasks.database.schema import list_relations
from tasks.workloads.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLength:
    """How long an answer is taken to be.

    Attributes:
        num_tokens: of every answer; 1 where the workload scores, because a prompt's last row gives the score.
        num_earlier_answers: whose mean it is; 0 where there are none and it is the workload's max_new_tokens.
    """

    num_tokens: int
    num_earlier_answers: int

    @property
    def expected_output_tokens(self) -> int | None:
        """What a request is told of it (`engine.Request`); None where no earlier answer says anything."""
        return self.num_tokens if self.num_earlier_answers else None


def read_answer_length(database: str | Path, workload: Workload) -> AnswerLength:
    """The mean of the workload's earlier answers, rounded, else its max_new_tokens.

    Raises:
        DatabaseError: it cannot be opened.
    """
    if workload.mode == "score":
        return AnswerLength(num_tokens=1, num_earlier_answers=0)
    with connect(database, read_only=True) as connection:
        if workload.output.table.lower() in list_relations(connection):
            query = fill_identifiers(statement("read/mean_answer_tokens"), table=workload.output.table)
            mean, num_answers = cast(tuple[float | None, int], connection.execute(query).fetchone())
            if mean is not None:
                num_tokens = min(max(1, round(mean)), workload.decoding.max_new_tokens)
                return AnswerLength(num_tokens=num_tokens, num_earlier_answers=num_answers)
    return AnswerLength(num_tokens=workload.decoding.max_new_tokens, num_earlier_answers=0)
