"""Computes a tiny model with the engine, under several policies, and with transformers' `generate`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.kernels import cdiv
from engine.model import stock_attention
from engine.model.model import Model, kv_shape_of
from engine.model.proof.tiny_model import VOCAB_SIZE, make_tiny_model
from engine.planning.prefix_groups import plan_prefix_groups
from engine.request import Request

NUM_NEW_TOKENS = 6
MOST_ERROR = 1e-3
"""Of a log-probability, in float32. Equivalent computations differ by about 1e-5."""

BLOCK_SIZE = 32


MakeEngine = Callable[[Model, EngineConfig], Any]
"""Makes an `Engine`, which this package cannot import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """From transformers' results, with this key of `policies`: the largest difference of a log-probability."""

    policy: str
    error: float


def policies(config: PretrainedConfig) -> dict[str, EngineConfig]:
    """The engine configurations with which the tiny model is computed."""
    common: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_size": BLOCK_SIZE, "compile": "never"}
    block_bytes = BLOCK_SIZE * kv_shape_of(config, torch.float32).bytes_per_token
    num_blocks = cdiv(max(map(len, prompts())) + NUM_NEW_TOKENS, BLOCK_SIZE) + 1
    return {
        "whole prompts": EngineConfig(**common, kv_memory_bytes=100 * block_bytes, sharing="none"),
        "shared prefixes in chunks": EngineConfig(
            **common, kv_memory_bytes=100 * block_bytes, max_num_batched_tokens=19
        ),
        "preempted": EngineConfig(**common, kv_memory_bytes=num_blocks * block_bytes, output_reserve=0.0),
    }


def prompts() -> list[list[int]]:
    """Two levels of shared prefixes, longer than a shrunk window; prompts that end with a block; a single token."""
    rng = np.random.default_rng(3)

    def draw(count: int) -> list[int]:
        return [int(token) for token in rng.integers(3, VOCAB_SIZE, count)]

    instruction = draw(34)
    document = instruction + draw(33)
    return [document + draw(1), document + draw(28), instruction + draw(28), instruction + draw(2), draw(62), draw(1)]


def as_request(name: str, prompt: list[int]) -> Request:
    """A request that generates NUM_NEW_TOKENS tokens, also after an eos token."""
    token_ids = np.array(prompt, dtype=np.int32)
    return Request(request_id=name, token_ids=token_ids, max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True)


def find_difference(config: PretrainedConfig, make_engine: MakeEngine) -> Difference | None:
    """Computes a tiny model with both; None if the results agree. Raises `ModelError` if one of them cannot."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a tiny model is slower with more threads
    try:
        return _compare(config, make_engine)
    except ModelError:
        raise
    except Exception as error:  # layers that do not fit the engine, or a size that is too small, raise anything
        raise ModelError(f"a tiny model of it cannot be computed: {type(error).__name__}: {error}") from error
    finally:
        torch.set_num_threads(num_threads)


def _compare(config: PretrainedConfig, make_engine: MakeEngine) -> Difference | None:
    model = make_tiny_model(config)
    expected = [_generate(model, prompt) for prompt in prompts()]
    labels = tuple((token,) for token in range(VOCAB_SIZE))
    requests = [
        *(as_request(f"g{i}", prompt) for i, prompt in enumerate(prompts())),
        *(replace(as_request(f"s{i}", prompt), mode="score", labels=labels) for i, prompt in enumerate(prompts())),
    ]
    for name, engine_config in policies(config).items():
        layers = set[int]()
        ours = Model(model, device=torch.device("cpu"), owns_weights=False)
        with _noting_layers(layers):
            made = make_engine(ours, engine_config)
            groups = plan_prefix_groups([request.token_ids for request in requests])
            answers = {answer.request_id: answer for answer in made.run_plan(requests, groups)}
        missing = set(range(config.num_hidden_layers)) - layers
        if missing and not ours.has_replaced_layers:
            raise ModelError(f"layer {min(missing)} does not use transformers' attention interface")
        error, has_other_tokens = 0.0, False
        for i, (token_ids, logprobs) in enumerate(expected):
            found = torch.tensor(answers[f"s{i}"].label_logprobs, dtype=torch.float64)
            error = max(error, float((found - logprobs).abs().max().nan_to_num(torch.inf)))
            has_other_tokens |= list(answers[f"g{i}"].token_ids) != token_ids
        if error > MOST_ERROR or has_other_tokens:
            return Difference(policy=name, error=error)
    return None


def _generate(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """transformers' greedy tokens, and the log-probabilities of the first one, float64 ``[vocab_size]``."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return made.sequences[0, len(prompt) :].tolist(), made.logits[0][0].double().log_softmax(-1)


@contextmanager
def _noting_layers(layers: set[int]) -> Iterator[None]:
    """Adds to `layers` the indices of the layers whose attention is called within the block."""

    def attend(module: nn.Module, *tensors: Any, **keywords: Any) -> Any:
        layers.add(int(module.layer_idx))  # type: ignore[arg-type]
        return stock_attention.attend(module, *tensors, **keywords)

    registered = AttentionInterface()[stock_attention.ATTENTION_NAME]
    AttentionInterface.register(stock_attention.ATTENTION_NAME, attend)
    try:
        yield
    finally:
        AttentionInterface.register(stock_attention.ATTENTION_NAME, registered)
