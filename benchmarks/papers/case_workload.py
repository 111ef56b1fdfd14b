"""Synthetic workloads of BatchLLM's case studies (section 6.2), as requests in the order of a table's rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Lengths of a case study; means are the paper's where it gives them.

    Documents vary by a half to both sides of their mean, own parts and answers by a quarter: answers of one task are
    "relatively concentrated" (section 4.3.2). How many requests share a document is drawn from a geometric
    distribution. The paper's average share degree is taken as what a request sees, itself included, which is one less
    than twice the mean over documents: with case 1's lengths this saves 55 % of the tokens, as the paper reports; 7
    requests to every document would save 63 %.

    Attributes:
        instruction_tokens: length of the instruction, which is the same in all prompts and part of the prefix.
        prefix_tokens, own_tokens, answer_tokens: means.
        share_degree: requests that share a prefix, averaged over requests.
        answer_spread: largest distance of an answer's length from the mean, as a fraction of the mean.
    """

    name: str
    num_requests: int
    instruction_tokens: int
    prefix_tokens: int
    own_tokens: int
    answer_tokens: int
    share_degree: float
    answer_spread: float = 0.25

    def scaled(self, scale: float, num_requests: int) -> "Case":
        """The same with lengths times `scale`; share degrees stay."""
        return replace(
            self,
            num_requests=num_requests,
            instruction_tokens=round(self.instruction_tokens * scale),
            prefix_tokens=round(self.prefix_tokens * scale),
            own_tokens=round(self.own_tokens * scale),
            answer_tokens=max(2, round(self.answer_tokens * scale)),
        )

    def requests(self, *, is_shuffled: bool = True, vocab_size: int = 32_000, seed: int = 7) -> list[Request]:
        """Greedy requests whose answers all have their full length; ids are positions before shuffling."""
        rng = np.random.default_rng(seed)
        instruction = _tokens(rng, self.instruction_tokens, vocab_size)
        requests: list[Request] = []
        while len(requests) < self.num_requests:
            num_tokens = _around(rng, self.prefix_tokens, 0.5) - self.instruction_tokens
            prefix = np.concatenate([instruction, _tokens(rng, num_tokens, vocab_size)])
            for _ in range(int(rng.geometric(2 / (self.share_degree + 1)))):
                own = _tokens(rng, _around(rng, self.own_tokens, 0.25), vocab_size)
                requests.append(
                    Request(
                        request_id=str(len(requests)),
                        token_ids=np.concatenate([prefix, own]),
                        max_new_tokens=_around(rng, self.answer_tokens, self.answer_spread),
                        expected_output_tokens=self.answer_tokens,
                        ignore_eos=True,
                    )
                )
        del requests[self.num_requests :]
        return [requests[index] for index in rng.permutation(len(requests))] if is_shuffled else requests


CASE_1 = Case(
    name="case 1", num_requests=3000, instruction_tokens=64, prefix_tokens=1100, own_tokens=400, answer_tokens=136,
    share_degree=7.0,
)  # fmt: skip
CASE_2 = Case(
    name="case 2", num_requests=1000, instruction_tokens=64, prefix_tokens=770, own_tokens=978, answer_tokens=20,
    share_degree=11.36,
)  # fmt: skip


def longest_tokens(requests: Sequence[Request]) -> int:
    """Tokens of the longest request with its answer."""
    return max(len(request.token_ids) + request.max_new_tokens for request in requests)


def _tokens(rng: np.random.Generator, count: int, vocab_size: int) -> np.ndarray:
    return rng.integers(3, vocab_size, max(1, count), dtype=np.int32)


def _around(rng: np.random.Generator, mean: int, spread: float) -> int:
    return max(1, round(mean * rng.uniform(1 - spread, 1 + spread)))
