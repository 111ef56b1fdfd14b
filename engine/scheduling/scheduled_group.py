"""A prefix group as the scheduler runs it: the node of its prefix's KV, and a sequence for each distinct answer."""

from collections.abc import Sequence as Sequences
from dataclasses import dataclass

from engine.scheduling.prefix_node import PrefixNode
from engine.scheduling.sequence import Sequence, expected_extra_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduledGroup:
    """Distinct prompts below one prefix node; None where nothing is shared."""

    node: PrefixNode | None
    sequences: Sequences[Sequence]

    @property
    def decode_to_prefill_ratio(self) -> float:
        """Eq. 3 over the group, as Eq. 4 has it: tokens it will probably decode for the tokens it must prefill."""
        num_prefill = sum(s.num_suffix for s in self.sequences) + (self.node.end if self.node is not None else 0)
        return sum(expected_extra_tokens(s.request) for s in self.sequences) / num_prefill
