"""What orders of parts cost in tokens that a plan computes, and which ones are best for workloads answered together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from engine.planning.choose_prefixes import PlanMethod
from tasks.layouts.estimate import find_orders, read_part_texts
from tasks.layouts.parts import Order, Parts, arrange_workload, split_prompt
from tasks.plan_prefix import write_plan
from tasks.storage.artifact import ArtifactRef, open_parquet, write_parquet
from tasks.storage.plan_file import read_plan_summary
from tasks.tokenize import BATCH_ROWS, TOKENS_SCHEMA, write_tokens
from tasks.workloads.workload import Workload

PARTITION_TOKENS = 1 << 60
"""One partition: where a night cuts its work says nothing of a layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A workload and the rows for which its layout is looked at.

    Attributes:
        workload: as its file has it.
        requests: the rows.
        orders: that it may have; the first one is its own so far.
    """

    workload: Workload
    requests: ArtifactRef
    orders: Sequence[Order]

    @property
    def parts(self) -> Parts:
        """Of its template."""
        return split_prompt(self.workload)


@dataclass(frozen=True, slots=True)
class LayoutSearch:
    """Counts and compares; prompts that were made once are kept in a folder.

    Attributes:
        checkpoint: whose tokenizer counts.
        max_model_len: tokens of the longest prompt plus answer.
        method: of the plans.
        folder: for prompts and plans; its owner deletes it.
    """

    checkpoint: Path
    max_model_len: int
    method: PlanMethod
    folder: Path
    _tokens: dict[tuple[str, str], ArtifactRef] = field(default_factory=dict)

    def find_best(self, candidates: Sequence[Candidate]) -> list[Order]:
        """The order of each candidate: the best ones by their text where the plan computes fewer tokens with them.

        Else their first ones.
        """
        texts = [read_part_texts(each.requests, each.workload, each.parts) for each in candidates]
        found = find_orders(texts, [each.orders for each in candidates])
        before = [each.orders[0] for each in candidates]
        is_better = found != before and self.count_tokens(candidates, found) < self.count_tokens(candidates, before)
        return found if is_better else before

    def count_tokens(
        self, candidates: Sequence[Candidate], orders: Sequence[Order], method: PlanMethod | None = None
    ) -> int:
        """Prompt tokens that one plan of all candidates computes.

        Args:
            candidates: planned together.
            orders: of the parts of each.
            method: of the plan; None for the search's own.
        Raises:
            ArtifactError: requests are not what their reference says.
            ModelError: the tokenizer cannot be used.
        """
        prompts = [self._write_prompts(each, order) for each, order in zip(candidates, orders, strict=True)]
        joint = write_parquet(self.folder / "joint.parquet", TOKENS_SCHEMA, _renumber(prompts))
        plan = write_plan(joint, self.folder / "plan.parquet", method or self.method, PARTITION_TOKENS, 1)
        return read_plan_summary(plan).sharing.num_processed_tokens

    def _write_prompts(self, candidate: Candidate, order: Order) -> ArtifactRef:
        arranged = arrange_workload(candidate.workload, order)
        key = (arranged.digest, candidate.requests.digest)
        if key not in self._tokens:
            target = self.folder / f"tokens-{len(self._tokens)}.parquet"
            self._tokens[key] = write_tokens(candidate.requests, target, arranged, self.checkpoint, self.max_model_len)
        return self._tokens[key]


def _renumber(prompts: Sequence[ArtifactRef]) -> Iterator[pa.RecordBatch]:
    """The rows of all files, numbered on."""
    num_rows = 0
    for ref in prompts:
        with open_parquet(ref) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                row_ids = pa.array(range(num_rows, num_rows + batch.num_rows), pa.int64())
                num_rows += batch.num_rows
                batch = batch.set_column(0, TOKENS_SCHEMA.field("row_id"), row_ids)
                yield pa.RecordBatch.from_arrays(batch.columns, schema=TOKENS_SCHEMA)
