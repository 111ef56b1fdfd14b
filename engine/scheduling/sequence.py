"""A prompt being answered: its tokens beyond the shared prefix, its KV blocks, how far it has come; groups of these."""

from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.kernels import cdiv
from engine.kv.block_pool import BlockPool
from engine.request import Request
from engine.scheduling.prefix_node import PrefixNode


class Sequence:
    """Running state of one distinct prompt with one way of answering.

    Own tokens are the prompt's suffix followed by what was generated (or, while a label of several tokens is scored,
    by the label's tokens but the last). Own token i stands at prompt position prefix_length + i.

    Attributes:
        request: stands for all its owners, the indices of the requests that get this answer.
        node: of the shared prefix; None where nothing is shared.
        num_suffix: own tokens that belong to the prompt.
        own_token_ids: int32, own tokens, room for all that there may be; beyond `length`, guesses or anything.
        length, num_computed: own tokens so far; of these, those whose KV is written.
        num_known: of `length`, those that the host knows; the others are negative (`TokenBatch`).
        block_ids: int32, block table of the own KV; may reach beyond `length`, for tokens still expected. A
            `WindowedPool` makes a column of each of its tables.
        admission: order in which it was given memory; the latest is the first to lose it.
        num_guesses: tokens behind the known ones that the step under way computes, in case the answer goes on so.
        ending_start: own place at which the ending begins that was found before these (`PromptLookup`).
        num_charged: prefix tokens that were computed on account of this sequence.
        compute_ms: its part of the time of the steps that are done.
        num_reused: own prompt tokens whose blocks were in a `BlockCache`; all of them until something is computed.
        error: why its answer cannot go on; None where it can.
        is_watched: any token may end its answer, or be followed by others for certain, so each is looked at.
        is_answered: finished or killed; the results of its rows still under way are dropped.
        label: index of the label of several tokens being scored; -1 until the prompt is computed.
        first_scores, tail_sums: of each label, the logit of its first token and the natural-log probability of the
            others, as far as they are scored.
        vector: what a pooled answer is made of; None until it is computed.
    """

    __slots__ = (
        *(
            "admission",
            "block_ids",
            "compute_ms",
            "ending_start",
            "error",
            "first_scores",
            "is_answered",
            "is_watched",
            "label",
            "length",
            "node",
        ),
        *("num_charged", "num_computed", "num_guesses", "num_known", "num_reused", "num_suffix", "own_token_ids"),
        *("owners", "prefix_length", "request", "tail_sums", "vector"),
    )

    def __init__(self, *, request: Request, owners: tuple[int, ...], node: PrefixNode | None) -> None:
        self.request = request
        self.owners = owners
        self.node = node
        self.prefix_length = node.end if node is not None else 0
        suffix = request.token_ids[self.prefix_length :]
        self.num_suffix = len(suffix)
        self.length = self.num_suffix + len(request.opening)
        self.num_known = self.length
        self.own_token_ids = np.empty(self.num_suffix + most_extra_tokens(request) + 1, dtype=np.int32)
        self.own_token_ids[: self.length] = [*suffix, *request.opening] if request.opening else suffix
        self.num_computed = 0
        self.block_ids: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self.admission = -1
        self.num_guesses = 0
        self.ending_start = 0
        self.num_charged = 0
        self.compute_ms = 0.0
        self.num_reused = self.num_suffix
        self.is_watched = bool(request.stop) or request.is_constrained
        self.is_answered = False
        self.error: str | None = None
        self.label = -1
        self.first_scores = np.zeros(len(request.labels))
        self.tail_sums = np.zeros(len(request.labels))
        self.vector: npt.NDArray[np.float32] | None = None
        if node is not None:
            node.num_unfinished += 1

    @property
    def holds_kv(self) -> bool:
        return len(self.block_ids) > 0

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed for it."""
        return self.prefix_length - self.num_charged + self.num_reused

    @property
    def num_uncomputed(self) -> int:
        return self.length - self.num_computed

    @property
    def output_token_ids(self) -> list[int]:
        return self.own_token_ids[self.num_suffix : self.length].tolist()  # type: ignore[no-any-return]

    @property
    def num_output_tokens(self) -> int:
        return self.length - self.num_suffix

    @property
    def next_label(self) -> int:
        """The label of several tokens that follows the prompt or the label that is computed; -1 where none is left."""
        labels = self.request.labels
        first = max(self.label, 0) if self.num_computed == self.num_suffix else self.label + 1
        return next((index for index in range(first, len(labels)) if len(labels[index]) > 1), -1)

    def settle(self, place: int, token_id: int) -> bool:
        """Sets own token `place`: one that was appended as unknown, or the next one.

        Returns:
            whether the next one was guessed right; otherwise the guesses after it are dropped.
        """
        assert place <= self.length, "a token is sampled before those that it follows"
        is_right = self.num_guesses > 0 and bool(self.own_token_ids[place] == token_id)
        self.num_guesses = self.num_guesses - 1 if is_right else 0
        self.own_token_ids[place] = token_id
        self.num_known = place + 1
        if place == self.length:
            self.length = place + 1
        return is_right

    def start_label(self, label: int) -> None:
        """Puts a label's tokens but its last behind the prompt, over those of the label before it."""
        tail = self.request.labels[label][:-1]
        self.label = label
        self.tail_sums[label] = 0.0
        self.own_token_ids[self.num_suffix : self.num_suffix + len(tail)] = tail
        self.length = self.num_known = self.num_suffix + len(tail)
        self.num_computed = min(self.num_computed, self.num_suffix)

    def reserve(self, pool: BlockPool, num_tokens: int, block_size: int) -> None:
        """Takes blocks until they hold `num_tokens` own tokens, known or expected.

        Args:
            pool, block_size: where blocks are taken from, and the tokens in each.
        """
        num_blocks = cdiv(num_tokens, block_size)
        if num_blocks > len(self.block_ids):
            if not self.holds_kv and self.node is not None:
                self.node.num_resident += 1
            pool.extend(self, num_blocks)

    def free_blocks(self, pool: BlockPool) -> None:
        """Gives the blocks back. `num_computed` stays, for a copy of the KV in a `SwapSpace`."""
        if self.holds_kv and self.node is not None:
            self.node.num_resident -= 1
        pool.free(self.block_ids)
        self.block_ids = np.empty(0, dtype=np.int32)

    def release(self, pool: BlockPool) -> None:
        """Drops the own KV. Generated tokens are kept and computed again; a label being scored starts again."""
        self.free_blocks(pool)
        self.num_computed = 0
        if self.request.mode != "generate":
            self.length = self.num_known = self.num_suffix


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


def most_extra_tokens(request: Request) -> int:
    """Own tokens after the prompt whose KV may be needed: all but the last of the answer, or of the longest label."""
    if request.mode != "generate":
        return max(map(len, request.labels), default=1) - 1
    return request.max_new_tokens - 1


def most_tokens(request: Request) -> int:
    """Tokens of a request's prompt with its answer, or with its longest label."""
    return len(request.token_ids) + most_extra_tokens(request) + (not request.is_pooled)


def most_blocks(request: Request, block_size: int) -> int:
    """KV blocks that a request needs alone: one more than for the whole, as prefix and suffix are rounded up apart."""
    return cdiv(most_tokens(request), block_size) + 1


def expected_extra_tokens(request: Request) -> int:
    """As `most_extra_tokens`, of an answer as long as the request's estimate of it."""
    most = most_extra_tokens(request)
    if request.mode != "generate" or request.expected_output_tokens is None:
        return most
    return min(request.expected_output_tokens - 1, most)
