"""BatchLLM's workloads (section 6.1 and 6.2) and workloads of real texts, as token ids.

The paper's lengths are scaled by one factor, share degrees are kept. A workload has as many groups as its size takes,
or more, so that their prefixes do not fit in the KV memory at once; but at most three times its size (for short
prefixes of long prompts).
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.measuring.batch import Batch, Group, random_groups

MICRO_LENGTHS = ((2000, 200), (1000, 1000), (200, 2000))
MICRO_DEGREES = (4, 16)
OVERFLOW = 1.1
"""Least size of all prefixes, in multiples of the KV memory."""

INSTRUCTION = "Answer the question about the text in a few words.\n\nText: "
JUDGE_INSTRUCTION = "Does the passage answer the query? Reply with yes or no.\n\nQuery: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of workloads.

    Attributes:
        scale: factor of the paper's lengths.
        num_tokens: about so many distinct prompt tokens in a workload.
        kv_tokens: tokens whose KV fits in memory.
    """

    scale: float
    num_tokens: int
    kv_tokens: int
    vocab_size: int


def workload_names() -> list[str]:
    return [*_random_makers(), "squad", "ranking"]


def make_batches(
    names: list[str], sizes: Sizes, *, tokenizer: Path, squad: Path | None, ranking: Path | None
) -> Iterator[Batch]:
    """The named workloads; workloads of texts whose path is None are left out."""
    for name in names:
        if name in _random_makers():
            yield _random_makers()[name](name, sizes)
        elif name == "ranking" and ranking is not None:
            yield ranking_batch(name, sizes, Tokenizer.from_file(str(tokenizer)), ranking)
        elif name == "squad" and squad is not None:
            yield squad_batch(name, sizes, Tokenizer.from_file(str(tokenizer)), squad)


def _random_makers() -> dict[str, Callable[[str, Sizes], Batch]]:
    makers = {"case-1": case_1, "case-2": case_2, "control": control, "scoring": scoring, "questions": questions}
    for prefix, own in MICRO_LENGTHS:
        for degree in MICRO_DEGREES:
            makers[f"micro-{prefix}-{own}-{degree}"] = micro
    return makers


def case_1(name: str, sizes: Sizes) -> Batch:
    """Snippets: documents of about 1,100 tokens, 7 queries of about 400 to each; answers of 64 tokens."""
    return _varied(name, sizes, prefix_tokens=1100, own_tokens=400, degree=7.0, num_output_tokens=64)


def case_2(name: str, sizes: Sizes) -> Batch:
    """Ranking: queries of about 770 tokens, 11.36 documents of about 978 to each; answers of 16 tokens."""
    return _varied(name, sizes, prefix_tokens=770, own_tokens=978, degree=11.36, num_output_tokens=16)


def scoring(name: str, sizes: Sizes) -> Batch:
    """Case 2 without generation: two labels are scored after each prompt."""
    labels = (sizes.vocab_size // 3, sizes.vocab_size // 2)
    return _varied(name, sizes, prefix_tokens=770, own_tokens=978, degree=11.36, num_output_tokens=1, labels=labels)


def questions(name: str, sizes: Sizes) -> Batch:
    """Decisions: 8 questions of 24 tokens about each row of 400; two labels are scored. Lengths are not scaled."""
    labels = (sizes.vocab_size // 3, sizes.vocab_size // 2)
    return _random_batch(name, sizes, [(400, [24] * 8)] * _num_groups(sizes, 400, 8 * 24), 1, labels)


def control(name: str, sizes: Sizes) -> Batch:
    """No shared prefixes: prompts as long as those of case 1."""
    return _varied(name, sizes, prefix_tokens=1100, own_tokens=400, degree=1.0, num_output_tokens=64)


def micro(name: str, sizes: Sizes) -> Batch:
    """One point of the micro grid: all lengths equal; answers of 100 tokens."""
    prefix_tokens, own_tokens, degree = (int(number) for number in name.split("-")[1:])
    prefix_tokens, own_tokens = _scaled(prefix_tokens, sizes), _scaled(own_tokens, sizes)
    num_groups = _num_groups(sizes, prefix_tokens, degree * own_tokens)
    return _random_batch(name, sizes, [(prefix_tokens, [own_tokens] * degree)] * num_groups, _scaled(100, sizes))


def _varied(
    name: str,
    sizes: Sizes,
    *,
    prefix_tokens: int,
    own_tokens: int,
    degree: float,
    num_output_tokens: int,
    labels: tuple[int, ...] = (),
) -> Batch:
    """Lengths vary by up to a quarter around the mean; degrees are the two whole numbers around the mean."""
    rng = np.random.default_rng(5)
    prefix_tokens, own_tokens = _scaled(prefix_tokens, sizes), _scaled(own_tokens, sizes)
    num_groups = _num_groups(sizes, prefix_tokens, round(degree * own_tokens))
    degrees = np.diff(np.floor(np.arange(num_groups + 1) * degree + 0.5)).astype(int)

    def around(mean: int) -> int:
        return int(rng.integers(math.ceil(mean * 0.75), math.floor(mean * 1.25) + 1))

    lengths = [(around(prefix_tokens), [around(own_tokens) for _ in range(count)]) for count in degrees]
    return _random_batch(name, sizes, lengths, _scaled(num_output_tokens, sizes), labels)


def _random_batch(
    name: str,
    sizes: Sizes,
    lengths: list[tuple[int, list[int]]],
    num_output_tokens: int,
    labels: tuple[int, ...] = (),
) -> Batch:
    groups = random_groups(np.random.default_rng(7), lengths, sizes.vocab_size)
    return _batch(name, groups, num_output_tokens, sizes.vocab_size, labels)


def _batch(
    name: str, groups: list[Group], num_output_tokens: int, vocab_size: int, labels: tuple[int, ...] = ()
) -> Batch:
    num_requests = sum(len(group.own) for group in groups)
    prefix = round(np.mean([len(group.prefix) for group in groups]))
    own = round(np.mean([len(tokens) for group in groups for tokens in group.own]))
    outputs = "two labels scored" if labels else f"{num_output_tokens} new token{'s' if num_output_tokens > 1 else ''}"
    return Batch(
        name=name,
        shape=f"{len(groups)} x {num_requests / len(groups):.4g} prompts of {prefix} + {own} tokens, {outputs}",
        groups=groups,
        num_output_tokens=num_output_tokens,
        labels=list(labels),
        vocab_size=vocab_size,
    )


def _scaled(num_tokens: int, sizes: Sizes) -> int:
    return max(1, round(num_tokens * sizes.scale))


def _num_groups(sizes: Sizes, prefix_tokens: float, own_tokens: float) -> int:
    for_size = sizes.num_tokens / (prefix_tokens + own_tokens)
    to_overflow = OVERFLOW * sizes.kv_tokens / prefix_tokens
    return math.ceil(max(2, for_size, min(to_overflow, 3 * for_size)))


def squad_batch(name: str, sizes: Sizes, tokenizer: Tokenizer, file: Path) -> Batch:
    """SQuAD's form: paragraphs with the questions about them."""
    groups = [
        _text_group(
            tokenizer,
            f"{INSTRUCTION}{paragraph['context']}\n\nQuestion:",
            [f" {qa['question']}\nAnswer:" for qa in paragraph["qas"]],
        )
        for article in json.loads(file.read_text())["data"]
        for paragraph in article["paragraphs"]
        if paragraph["qas"]
    ]
    return _batch(name, _as_many_as_fit(groups, sizes), 16, sizes.vocab_size)


def ranking_batch(name: str, sizes: Sizes, tokenizer: Tokenizer, folder: Path) -> Batch:
    """TREC's form: queries.tsv and corpus.tsv (id, text), qrels.txt (query, 0, passage, grade): each
    passage graded for a query is judged yes or no."""
    queries, passages = (
        dict(line.split("\t", 1) for line in (folder / file).read_text().splitlines() if line)
        for file in ("queries.tsv", "corpus.tsv")
    )
    candidates: dict[str, list[str]] = {}
    for line in (folder / "qrels.txt").read_text().splitlines():
        query, _, passage, _ = line.split()
        candidates.setdefault(query, []).append(passage)
    groups = [
        _text_group(
            tokenizer,
            f"{JUDGE_INSTRUCTION}{queries[query]}\n\nPassage:",
            [f" {passages[passage]}\n\nAnswer:" for passage in dict.fromkeys(found)],
        )
        for query, found in candidates.items()
    ]
    labels = tuple(tokenizer.encode(word, add_special_tokens=False).ids[0] for word in (" yes", " no"))
    return _batch(name, _as_many_as_fit(groups, sizes), 1, sizes.vocab_size, labels)


def _text_group(tokenizer: Tokenizer, prefix: str, own: list[str]) -> Group:
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return Group(prefix=encode(prefix), own=[encode(text) for text in own])


def _as_many_as_fit(groups: list[Group], sizes: Sizes) -> list[Group]:
    """Items evenly spread over the file, so that a part resembles the whole."""
    distinct = np.mean([len(group.prefix) + sum(map(len, group.own)) for group in groups])
    prefix = np.mean([len(group.prefix) for group in groups])
    count = min(len(groups), _num_groups(sizes, float(prefix), float(distinct - prefix)))
    return [groups[index * len(groups) // count] for index in range(count)]
