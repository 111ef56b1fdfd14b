"""Bfloat16 and float32 with `deterministic`: answers that do not depend on what else is computed, to the last bit."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, MistralConfig, MistralForCausalLM, PreTrainedModel

from engine import Engine, EngineConfig, Request
from engine.errors import ConfigError, ModelError
from engine.kernels.cpu.deterministic import DeterministicBackend
from engine.kernels.output_layer import columns_in_float64
from engine.model.loading.checkpoint import cache_folder
from engine.model.proof.tiny_model import make_tiny_model, shrink
from tests.engine.model.any_batch import KV_BYTES, Answers, answer, answer_alone, check_any_batch, requests_of
from tests.engine.model.families import make_config

SHARED = [(7 * i * i + i) % 490 + 3 for i in range(420)]
PROMPTS = [
    *([*SHARED[:300], 20 + number, 30 + number] for number in range(3)),
    *([*SHARED[: 210 + 40 * number], *range(10, 10 + 23 * number)] for number in range(1, 4)),
    *([*SHARED, *range(9, 9 + number)] for number in (1, 2)),
    *([4 + number] * (1 + 60 * number) for number in range(3)),
]
"""Shared beginnings that end within a block and within a chunk of attention, before and behind the first one."""


LoadModel = Callable[..., Engine]

BRANCHED = ("phi", "qwen3_moe")
"""With more operations than Llama's: LayerNorm, biases and feed-forwards beside attention; experts."""


def load(model: Path | PreTrainedModel, **changes: Any) -> Engine:
    given = {"dtype": "bfloat16", "device": "cpu", "kv_memory_bytes": KV_BYTES, "deterministic": True} | changes
    return Engine.load(model, EngineConfig(**given))


def load_branched(family: str, *, dtype: str, **changes: Any) -> Engine:
    config = shrink(make_config(family))
    config.vocab_size = 512
    return load(make_tiny_model(config).to(getattr(torch, dtype)), dtype=dtype, **changes)


@pytest.fixture
def num_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["llama", "qwen3", *BRANCHED])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def load_model(family: str, tiny_checkpoint: Callable[[str], Path], dtype: str) -> LoadModel:
    if family in BRANCHED:
        return partial(load_branched, family, dtype=dtype)
    return partial(load, tiny_checkpoint(family), dtype=dtype)


@pytest.fixture(scope="module")
def alone(load_model: LoadModel) -> Answers:
    return answer_alone(load_model(max_num_batched_tokens=64), PROMPTS)


def test_prompts_together_are_answered_as_alone(
    load_model: LoadModel, alone: Answers, num_threads: Callable[[int], None]
) -> None:
    for threads, max_num_batched_tokens in ((1, 2048), (2, 150)):
        num_threads(threads)
        engine = load_model(max_num_batched_tokens=max_num_batched_tokens)
        assert answer(engine, requests_of(PROMPTS, [*range(len(PROMPTS))])) == alone


@pytest.mark.slow
@settings(max_examples=3)
@given(data=st.data())
def test_answers_do_not_depend_on_the_batch(
    data: st.DataObject, load_model: LoadModel, family: str, dtype: str, alone: Answers
) -> None:
    """In steps of any size, guessed or not, and in memory for a thousand tokens or less."""
    few_bytes = (1 << 18) * (4 if family in BRANCHED else 1) * (2 if dtype == "float32" else 1)
    others = {
        "kv_memory_bytes": st.sampled_from([KV_BYTES, few_bytes]),
        "max_num_batched_tokens": st.sampled_from([33, 200, 2048]),
        "prompt_lookup": st.sampled_from(["never", "always"]),
    }
    check_any_batch(data, load_model, PROMPTS, alone, **others)


def test_a_column_of_labels_is_the_same_with_any_others() -> None:
    backend = DeterministicBackend(
        num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.bfloat16, block_size=32,
        folder=cache_folder(),
    )  # fmt: skip
    hidden, weight, bias = torch.randn(150, 999), torch.randn(7, 999), torch.randn(7)
    found = backend.label_columns(hidden, weight, bias)
    assert torch.allclose(found, columns_in_float64(hidden, weight, bias), rtol=1e-12, atol=1e-12)
    for row in (0, 63, 64, 149):
        alone = [
            backend.label_columns(hidden[row : row + 1], weight[at : at + 1], bias[at : at + 1]) for at in range(7)
        ]
        assert torch.equal(torch.cat(alone, dim=1), found[row : row + 1])
    assert backend.label_columns(hidden[:0], weight, None).shape == (0, 7)


def test_blocks_that_are_no_part_of_a_chunk_of_attention(tiny_llama: Path) -> None:
    """A prefix of 288 tokens fills three blocks of 96; a chunk of 256 ends within one."""
    prompts = [[*SHARED[:288], 7, 7 + number] for number in range(4)]
    requests = [Request(request_id=str(n), token_ids=prompt, max_new_tokens=6) for n, prompt in enumerate(prompts)]
    found = [load(tiny_llama, block_size=size).generate(requests) for size in (32, 96)]
    assert [answer.token_ids for answer in found[0]] == [answer.token_ids for answer in found[1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "deterministic goes with dtype 'auto' or 'bfloat16' or 'float32' or 'int8' or"),
        ({"attention": "torch"}, "deterministic goes with attention 'auto' or 'native', got 'torch'"),
        ({"device": "cuda"}, "deterministic goes with device 'auto' or 'cpu', got 'cuda'"),
        ({"keep_prefixes_bytes": 1}, "deterministic goes with keep_prefixes_bytes 0, got 1"),
        ({"tensor_parallel_size": 2}, "deterministic goes with tensor_parallel_size 1, got 2"),
    ],
)
def test_what_depends_on_the_batch_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(deterministic=True, **change)


def test_sizes_that_only_torch_multiplies_are_refused() -> None:
    config = shrink(make_config("granite"))
    config.intermediate_size = 48
    with pytest.raises(ModelError, match="deterministic takes layers with sizes of multiples of 32"):
        load(make_tiny_model(config), dtype="float32")


def test_a_window_is_refused(tiny_llama: Path) -> None:
    values = AutoConfig.from_pretrained(tiny_llama).to_dict() | {"sliding_window": 40, "architectures": None}
    model = MistralForCausalLM(MistralConfig(**{**values, "model_type": "mistral"}))
    with pytest.raises(
        ModelError, match="deterministic takes layers without a sliding window, got one of 40 positions"
    ):
        Engine.load(model, EngineConfig(dtype="bfloat16", device="cpu", kv_memory_bytes=KV_BYTES, deterministic=True))
