"""Grammars as transformers' own `generate` is held to them, and answers judged by it."""

from pathlib import Path

import torch
import transformers
from llguidance import LLMatcher
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

from engine import Grammar, Request, Vocabulary


def load_vocabulary(checkpoint: Path, **sizes: int) -> Vocabulary:
    """Of a checkpoint's tokenizer, and its model unless sizes say otherwise."""
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    vocab_size = sizes.get("vocab_size", config.vocab_size)
    return Vocabulary(tokenizer, vocab_size=vocab_size, eos_token_ids={config.eos_token_id})


class GrammarProcessor(LogitsProcessor):
    """Masks the logits of one row: what the grammar forces, its tokens one by one; else what it allows."""

    def __init__(self, grammar: Grammar, num_prompt_tokens: int, eos_token_id: int) -> None:
        self._matcher: LLMatcher = grammar.new_matcher()
        self._num_seen = num_prompt_tokens
        self._eos = eos_token_id
        self._forced: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token in input_ids[0, self._num_seen :].tolist():
            assert self._matcher.consume_token(token)
        self._num_seen = input_ids.shape[1]
        self._forced = self._forced[1:] or self._matcher.compute_ff_tokens()
        is_allowed = torch.zeros(scores.shape[1], dtype=torch.bool)
        if self._forced:
            is_allowed[self._forced[0]] = True
        else:
            bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
            places = torch.arange(scores.shape[1])
            is_allowed = (bits[places // 8] >> (places % 8) & 1).bool()
        return scores.masked_fill(~is_allowed, -torch.inf)


def generate_by_transformers(checkpoint: Path, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    """Greedy answers in float32, each request alone."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    eos = model.config.eos_token_id
    answers = {}
    for request in requests:
        prompt = torch.tensor([request.token_ids.tolist()])
        processors = [] if request.grammar is None else [GrammarProcessor(request.grammar, prompt.shape[1], eos)]
        with torch.inference_mode():
            tokens = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.max_new_tokens,
                do_sample=False, eos_token_id=eos, pad_token_id=eos, logits_processor=processors,
            )  # fmt: skip
        answers[request.request_id] = tuple(tokens[0, prompt.shape[1] :].tolist())
    return answers
