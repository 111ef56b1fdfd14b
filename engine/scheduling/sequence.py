"""A prompt being answered: its tokens beyond the shared prefix, its KV blocks, its progress; and groups of these."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.completion import FinishReason
from engine.kernels import cdiv
from engine.kv.block_pool import NO_BLOCKS, BlockPool
from engine.request import Request
from engine.scheduling.prefix_node import PrefixNode


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Sequence:
    """Running state of one distinct prompt with one way of answering.

    Its own tokens are the prompt's suffix, then the generated tokens (or, while a label of several tokens is scored,
    the label's tokens but the last). Own token i has position prefix_length + i.

    Attributes:
        request: the one that is computed, on behalf of all owners.
        owners: indices of the requests that get this answer.
        node: the last node of its shared prefix; None where nothing is shared.
        num_suffix: own tokens that belong to the prompt.
        own_token_ids: int32, room for the longest answer; from `length` on there are guessed tokens or garbage.
        length, num_computed: own tokens so far; of these, those whose KV is written.
        num_known: of `length`, those that the host knows; the others are negative (`TokenBatch`).
        block_ids: int32, block table of the own KV; may reserve blocks beyond `length` for expected tokens. With a
            `WindowedPool`, one column for each of its tables.
        admission: number of its admission to KV memory; the latest one is preempted first.
        num_guesses: guessed tokens that follow the known ones in the step in flight.
        ending_start: index of the own token at which the ending begins that the guesses follow (`PromptLookup`).
        num_charged: prefix tokens whose computation is counted for this sequence.
        compute_ms: its share of the time of the steps so far.
        num_reused: own prompt tokens whose blocks were found in an `LruPool`; all of them until something is computed.
        error: why its answer cannot be completed; None where it can.
        is_watched: each of its tokens may end the answer or force the tokens that follow, so each is examined.
        finish_reason: None until it is answered or killed; then results of its rows still in flight are dropped.
        has_late_row: the step in flight when it was answered still computes a row of it.
        draws: what its random draws and penalties use in every step (`AnswerDraws`); None until the first of them.
        label: index of the label of several tokens being scored; -1 until the prompt is computed.
        first_scores, tail_sums: of each label, the logit of its first token, and the sum of the natural-log
            probabilities of its other tokens that are scored so far.
        vector: the pooled hidden state of an embedding or a classification; None until it is computed.
    """

    request: Request
    owners: tuple[int, ...]
    node: PrefixNode | None
    prefix_length: int = field(init=False)
    num_suffix: int = field(init=False)
    own_token_ids: npt.NDArray[np.int32] = field(init=False)
    length: int = field(init=False)
    num_computed: int = 0
    num_known: int = field(init=False)
    block_ids: npt.NDArray[np.int32] = field(default_factory=lambda: NO_BLOCKS)
    admission: int = -1
    num_guesses: int = 0
    ending_start: int = 0
    num_charged: int = 0
    compute_ms: float = 0.0
    num_reused: int = field(init=False)
    error: str | None = None
    is_watched: bool = field(init=False)
    finish_reason: FinishReason | None = None
    has_late_row: bool = False
    draws: object = None
    label: int = -1
    first_scores: npt.NDArray[np.float64] = field(init=False)
    tail_sums: npt.NDArray[np.float64] = field(init=False)
    vector: npt.NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        request = self.request
        self.prefix_length = self.node.end if self.node is not None else 0
        suffix = request.token_ids[self.prefix_length :]
        self.num_suffix = self.num_reused = len(suffix)
        self.length = self.num_known = self.num_suffix + len(request.opening)
        self.own_token_ids = np.empty(self.num_suffix + most_extra_tokens(request) + 1, dtype=np.int32)
        self.own_token_ids[: self.length] = [*suffix, *request.opening] if request.opening else suffix
        self.is_watched = bool(request.stop) or request.is_constrained
        self.first_scores, self.tail_sums = np.zeros((2, len(request.labels)))
        if self.node is not None:
            self.node.num_unfinished += 1

    def prefix_nodes(self) -> list[PrefixNode]:
        """The nodes of its shared prefix, from the root on; none where it shares none."""
        return [] if self.node is None else self.node.chain()

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed for this sequence."""
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
        """Index of the next label of several tokens to score; -1 where none is left."""
        labels = self.request.labels
        first = max(self.label, 0) if self.num_computed == self.num_suffix else self.label + 1
        return next((index for index in range(first, len(labels)) if len(labels[index]) > 1), -1)

    def set_token(self, place: int, token_id: int) -> bool:
        """Sets own token `place`, which is the next one or one that was appended as unknown. Returns whether it was
        guessed right; otherwise the guesses after it are dropped."""
        assert place <= self.length, "a token is set before the tokens that it follows"
        is_right = self.num_guesses > 0 and bool(self.own_token_ids[place] == token_id)
        self.num_guesses = self.num_guesses - 1 if is_right else 0
        self.own_token_ids[place] = token_id
        self.num_known = place + 1
        if place == self.length:
            self.length = place + 1
        return is_right

    def start_label(self, label: int) -> None:
        """Appends a label's tokens but its last to the prompt; they replace those of the label before."""
        tail = self.request.labels[label][:-1]
        self.label = label
        self.tail_sums[label] = 0.0
        self.own_token_ids[self.num_suffix : self.num_suffix + len(tail)] = tail
        self.length = self.num_known = self.num_suffix + len(tail)
        self.num_computed = min(self.num_computed, self.num_suffix)

    def reserve(self, pool: BlockPool, num_tokens: int) -> None:
        """Allocates blocks until they hold `num_tokens` own tokens, known or expected."""
        num_blocks = cdiv(num_tokens, pool.block_size)
        if num_blocks > len(self.block_ids):
            pool.extend(self, num_blocks)

    def free_blocks(self, pool: BlockPool) -> None:
        """Frees the blocks. `num_computed` stays as it is, for a copy of the KV in a `SwapSpace`."""
        pool.free(self.block_ids)
        self.block_ids = NO_BLOCKS

    def release(self, pool: BlockPool) -> None:
        """Drops the own KV. Generated tokens are kept, their KV is recomputed; a label being scored starts again."""
        self.free_blocks(pool)
        self.num_computed = 0
        if self.request.mode != "generate":
            self.length = self.num_known = self.num_suffix


ScheduledGroup = list[Sequence]
"""One or more distinct prompts with the same prefix node; a prompt without one is a group of its own."""


def most_extra_tokens(request: Request) -> int:
    """Own tokens after the prompt that may need KV: all of the answer, or of the longest label, but the last."""
    if request.mode != "generate":
        return max(map(len, request.labels), default=1) - 1
    return request.max_new_tokens - 1


def most_tokens(request: Request) -> int:
    """Tokens of a request's prompt with its longest answer, or with all but the last of its longest label."""
    return len(request.token_ids) + most_extra_tokens(request) + (request.mode == "generate")


def most_blocks(request: Request, block_size: int) -> int:
    """KV blocks that a request needs alone: one more than its tokens fill: prefix and suffix round up separately."""
    return cdiv(most_tokens(request), block_size) + 1


def expected_extra_tokens(request: Request) -> int:
    """As `most_extra_tokens`, for an answer of the request's expected length."""
    most = most_extra_tokens(request)
    if request.mode != "generate" or request.expected_output_tokens is None:
        return most
    return min(request.expected_output_tokens - 1, most)
