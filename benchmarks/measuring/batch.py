"""A batch of prompts with known sharing: groups of prompts below one prefix, in the order of a table's rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.peers.protocol import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Prompts with a common prefix.

    Attributes:
        own: the token ids after the prefix, one list per request.
    """

    prefix: list[int]
    own: list[list[int]]

    @property
    def prompts(self) -> list[list[int]]:
        return [self.prefix + own for own in self.own]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A workload as token ids.

    Attributes:
        labels: to be scored after each prompt; empty if tokens are generated.
        shape: description of the lengths and degrees.
    """

    name: str
    shape: str
    groups: list[Group]
    num_output_tokens: int
    labels: list[int]
    vocab_size: int

    @property
    def num_requests(self) -> int:
        return sum(len(group.own) for group in self.groups)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(group.own) * len(group.prefix) + sum(map(len, group.own)) for group in self.groups)

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens of all groups' prefixes, each counted once."""
        return sum(len(group.prefix) for group in self.groups)

    @property
    def num_distinct_tokens(self) -> int:
        """Prompt tokens to compute if every prefix is computed once."""
        return self.num_prefix_tokens + sum(len(own) for group in self.groups for own in group.own)

    @property
    def longest_request(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return self.num_output_tokens + max(len(group.prefix) + max(map(len, group.own)) for group in self.groups)

    def work(self, order: str, *, round_number: int = 0) -> Work:
        """The rows "grouped" by document, or "shuffled" with a fixed seed.

        The first token of every prompt depends on the round, so an engine cannot use what it cached in another round.
        Sharing within the round does not change.
        """
        prompts = [
            [(prompt[0] + 7919 * round_number) % self.vocab_size, *prompt[1:]]
            for group in self.groups
            for prompt in group.prompts
        ]
        if order == "shuffled":
            prompts = [prompts[index] for index in np.random.default_rng(11).permutation(len(prompts))]
        return Work(token_ids=prompts, num_output_tokens=self.num_output_tokens, labels=self.labels)

    def first(self, num_groups: int, num_members: int) -> "Batch":
        """A small part of the batch, to compare answers."""
        groups = [Group(prefix=group.prefix, own=group.own[:num_members]) for group in self.groups[:num_groups]]
        return replace(self, groups=groups)


def random_groups(
    rng: np.random.Generator,
    sizes: Sequence[tuple[int, Sequence[int]]],
    vocab_size: int,
) -> list[Group]:
    """Groups of random token ids: (prefix length, own lengths). Prefixes differ, and so do own parts within a group."""
    groups = []
    for prefix_tokens, own_tokens in sizes:
        prefix = rng.integers(0, vocab_size, prefix_tokens).tolist()
        own = [rng.integers(0, vocab_size, length).tolist() for length in own_tokens]
        for number, tokens in enumerate(own):
            tokens[0] = (tokens[0] + number) % vocab_size  # different first tokens, else prefixes would share one token
        groups.append(Group(prefix=prefix, own=own))
    return groups
