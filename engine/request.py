"""The engine's input, in token ids; the caller converts text. Its output: `engine.completion`."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from operator import index
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import numpy as np
import numpy.typing as npt

from engine.errors import RequestError, UnknownParameterError

if TYPE_CHECKING:
    from engine.grammar import Grammar
    from engine.penalties import Penalties
    from engine.thinking import Thinking

Mode = Literal["generate", "score", "embed", "classify"]

POOLED_MODES = ("embed", "classify")
"""Modes whose answer is made of the prompt's hidden states; no token is decoded, and no label is scored."""

_OPTIONAL = {"expected_output_tokens": 1, "dimensions": 1, "pair_separator": 0}
_WHOLE = {"max_new_tokens": None, "top_k": 0, "seed": 0, "priority": None, **_OPTIONAL}
"""Whole numbers, some of which may be None, with the least that is allowed in any mode."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One prompt and how to answer it.

    Args:
        request_id: chosen by the caller; unique within one call.
        token_ids: the prompt, at least one token; any integer sequence; an int32 array is kept, not copied.
        mode: "generate" decodes new tokens; "score" gives each label's log-probability; "embed" gives the prompt's
            embedding; "classify" gives the log-probability of each class that the checkpoint has a head for.
        max_new_tokens: generate only; at least 1. Includes the budget of `thinking`, which the answer cannot use.
        temperature: 0 is greedy; above 0 the logits are divided by it before sampling.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it; 1 keeps all.
        seed: of this request's own random stream. A sampled answer depends only on it and on the prompt.
        stop: strings that end the answer; they need the caller's decoder (`Engine.generate(..., decode=...)`).
        grammar: generate only; the form of the answer and its end, so stop strings are not allowed with it.
        penalties: generate only; lower the logits of tokens that prompt or answer have already.
        thinking: generate only; limits the thoughts before the answer, to which grammar and stop strings do not apply.
        ignore_eos: go on after an end-of-sequence token (benchmarks with fixed lengths).
        labels: score only; each label is a sequence of one or more token ids.
        priority: larger ones start first under the order "priority"; any whole number. It never changes an answer.
        expected_output_tokens: generate only; estimate of the answer's length; None: max_new_tokens. It never changes
            an answer, only the order of requests and the KV memory set aside for them.
        dimensions: embed only; number of leading values of the embedding to return; None: all.
        normalize: embed only; divide the returned values by their Euclidean norm.
        pair_separator: embed and classify; token id that ends the first of two texts, for encoders with token types.
    Raises:
        RequestError: for another keyword (`UnknownParameterError`) or a value out of range; it names request_id.
    """

    request_id: str
    token_ids: npt.NDArray[np.int32]
    mode: Mode = "generate"
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    grammar: "Grammar | None" = None
    penalties: "Penalties | None" = None
    thinking: "Thinking | None" = None
    ignore_eos: bool = False
    labels: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    expected_output_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool = True
    pair_separator: int | None = None

    def __new__(cls, **parameters: Any) -> "Request":
        known = [f.name for f in fields(cls)]
        unknown = sorted(parameters.keys() - set(known))
        if unknown:
            raise UnknownParameterError(
                f"request {parameters.get('request_id')!r}: unknown parameter {unknown[0]!r}; known: {', '.join(known)}"
            )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        def refuse(why: str) -> NoReturn:
            raise RequestError(f"request {self.request_id!r}: {why}")

        try:
            given = np.asarray(self.token_ids)
        except (TypeError, ValueError, OverflowError) as error:
            refuse(f"token_ids must be integers: {error}")
        if given.ndim != 1 or given.size == 0:
            refuse(f"the prompt must hold at least one token, got shape {given.shape}")
        if given.dtype.kind not in "iu":
            refuse(f"token_ids must be integers, got {given.dtype}")
        if given.min() < 0 or given.max() > np.iinfo(np.int32).max:
            what = "integers that fit int32 and are not negative"
            refuse(f"token_ids must be {what}, got {given.min()} to {given.max()}")
        token_ids = np.ascontiguousarray(given, dtype=np.int32)
        object.__setattr__(self, "token_ids", token_ids)
        try:
            object.__setattr__(self, "labels", tuple(tuple(map(index, label)) for label in self.labels))
        except (TypeError, ValueError) as error:
            refuse(f"labels must be sequences of token ids: {error}")
        is_one = isinstance(self.stop, str) or not isinstance(self.stop, Iterable)
        object.__setattr__(self, "stop", (self.stop,) if is_one else tuple(self.stop))
        for name in ("temperature", "top_p", *_WHOLE):
            if (given := getattr(self, name)) is None and name in _OPTIONAL:
                continue
            kind: Any = Integral if name in _WHOLE else Real
            is_number, least = isinstance(given, kind) and not isinstance(given, bool), _WHOLE.get(name)
            if not is_number or (least is not None and given < least):
                what = f"{'whole ' * (name in _WHOLE)}number" + ("" if least is None else f" from {least} on")
                refuse(f"{name} must be {'None or ' * (name in _OPTIONAL)}a {what}, got {given!r}")
            try:
                object.__setattr__(self, name, int(given) if name in _WHOLE else float(given))
            except OverflowError:
                refuse(f"{name} is too large: {given}")
        for name in ("ignore_eos", "normalize"):
            if not isinstance(getattr(self, name), bool | np.bool):
                refuse(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name, attribute in (("grammar", "opening"), ("penalties", "presence"), ("thinking", "max_tokens")):
            if (given := getattr(self, name)) is not None and not hasattr(given, attribute):
                refuse(f"{name} must be a {name.title()}, got {given!r}")
        if self.mode not in get_args(Mode):
            refuse(f"mode must be one of {', '.join(map(repr, get_args(Mode)))}, got {self.mode!r}")
        if self.mode != "score" and self.labels:
            refuse("labels belong to mode 'score'")
        if self.dimensions is not None and self.mode != "embed":
            refuse(f"dimensions belong to mode 'embed', got {self.dimensions} in mode {self.mode!r}")
        if self.mode == "generate" and self.max_new_tokens < 1:
            refuse(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.grammar is not None and (self.mode != "generate" or self.stop or self.ignore_eos):
            refuse("a grammar belongs to mode 'generate', without stop strings and ignore_eos: it says how answers end")
        if self.penalties is not None and self.mode != "generate":
            refuse("penalties belong to mode 'generate'")
        if self.thinking is not None and (self.mode != "generate" or self.max_new_tokens <= self.thinking.max_tokens):
            refuse(f"thinking belongs to mode 'generate', with max_new_tokens above its {self.thinking.max_tokens}")
        if self.mode == "score" and (len(set(self.labels)) < max(2, len(self.labels)) or not all(self.labels)):
            refuse(f"mode 'score' needs two or more labels, non-empty and different, got {self.labels}")
        if not self.temperature >= 0.0 or self.temperature == float("inf"):
            refuse(f"temperature must be a number from 0 on, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            refuse(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.seed >= 2**64:
            refuse(f"seed must be below 2**64, got {self.seed}")
        if not all(isinstance(s, str) and s for s in self.stop):
            refuse(f"stop must hold non-empty strings, got {self.stop}")

    @property
    def is_pooled(self) -> bool:
        """Whether the answer is made of the prompt's hidden states."""
        return self.mode in POOLED_MODES

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar or a budget of thoughts restricts or forces some of its tokens."""
        return self.grammar is not None or self.thinking is not None

    @property
    def opening(self) -> tuple[int, ...]:
        """Tokens that every answer begins with by the grammar; never the answer's last token."""
        if self.grammar is None or self.thinking is not None:
            return ()
        return self.grammar.opening[: self.max_new_tokens - 1]

    @property
    def answer_key(self) -> tuple[object, ...]:
        """Two requests with the same prompt and the same key have the same answer."""
        if self.is_pooled:
            return (self.mode, self.dimensions, self.normalize, self.pair_separator)
        if self.mode == "score":
            return (self.mode, self.labels)
        draws = (self.temperature, self.top_k, self.top_p, self.seed) if self.temperature > 0 else ()
        forms = (self.grammar, self.penalties, self.thinking)
        return (self.mode, self.max_new_tokens, self.stop, self.ignore_eos, *forms, draws)
