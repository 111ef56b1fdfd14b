"""LoRA adapters against models that peft has merged them into; exchanged without drift; refused by name."""

import json
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel, PreTrainedModel

from engine import Completion, Engine, EngineConfig, Request, plan_prefix_groups
from engine.encoding.encoder_engine import EncoderEngine
from engine.errors import BusyError, ConfigError, ModelError
from engine.model.adapters.adapter import Adapter, check_adapter
from engine.model.proof.tiny_model import make_tiny_model, shrink
from tests.adapters import merged_by_peft, save_adapter
from tests.tiny_encoders import save_encoder, save_modules

SHARED = [(7 * i) % 490 + 3 for i in range(40)]
PROMPTS = [*([*SHARED, 20 + number, 30 + number] for number in range(4)), [4] * 30, [9]]
LABELS = tuple((token,) for token in range(3, 500, 7))
NUM_NEW_TOKENS = 8
KINDS = {
    "alpha": {"lora_alpha": 3},
    "rank-stabilised": {"lora_alpha": 5, "use_rslora": True},
    "patterns": {"rank_pattern": {"layers.1.mlp.down_proj": 7}, "alpha_pattern": {"q_proj": 2, "layers.0.*v_proj": 9}},
    "some layers": {"layers_to_transform": [1]},
}


def load(checkpoint: Path | PreTrainedModel, adapter: Path | None = None, **settings: Any) -> Engine:
    keeps_base = settings.pop("keeps_base", False)
    config = {"dtype": "float32", "device": "cpu", "kv_memory_bytes": 1 << 22, "max_num_batched_tokens": 64} | settings
    found = None if adapter is None else Adapter.find(adapter)
    return Engine.load(checkpoint, EngineConfig(**config), adapter=found, keeps_base=keeps_base)


def scores(engine: Engine) -> list[tuple[float, ...]]:
    asked = [Request(request_id=str(i), token_ids=p, mode="score", labels=LABELS) for i, p in enumerate(PROMPTS)]
    return [completion.label_logprobs for completion in engine.score(asked)]


def written(engine: Engine) -> list[list[int]]:
    asked = [Request(request_id=str(i), token_ids=p, max_new_tokens=NUM_NEW_TOKENS) for i, p in enumerate(PROMPTS)]
    return [list(completion.token_ids) for completion in engine.generate(asked)]


def generated(model: PreTrainedModel) -> list[list[int]]:
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module")
def stock_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a family that transformers' own layers compute."""
    folder = tmp_path_factory.mktemp("starcoder2")
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "sliding_window": None}
    tiny = shrink(transformers.Starcoder2Config(**sizes, hidden_act="relu"))
    tiny.vocab_size = 512
    make_tiny_model(tiny).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "kind"), [*(("llama", kind) for kind in KINDS), ("qwen3", "alpha"), ("odd", "alpha")]
)
def test_answers_are_those_of_the_merged_model(
    family: str, kind: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(family)
    adapter = save_adapter(checkpoint, tmp_path, **KINDS[kind])
    merged = merged_by_peft(checkpoint, adapter)
    check_adapter(Adapter.find(adapter), checkpoint)
    engine = load(checkpoint, adapter)
    assert written(engine) == generated(merged)
    assert written(engine) != written(load(checkpoint)), "the adapter changes answers"
    found = scores(engine)
    with torch.inference_mode():
        for prompt, logprobs in zip(PROMPTS, found, strict=True):
            expected = merged(torch.tensor([prompt])).logits[0, -1, 3:500:7].double().log_softmax(-1)
            assert (torch.tensor(logprobs, dtype=torch.float64) - expected).abs().max() < 1e-4


def test_layers_of_transformers_take_adapters(stock_checkpoint: Path, tmp_path: Path) -> None:
    adapter = save_adapter(stock_checkpoint, tmp_path, target_modules=["k_proj", "c_fc"])
    assert written(load(stock_checkpoint, adapter)) == generated(merged_by_peft(stock_checkpoint, adapter))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"dtype": "bfloat16"}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("qwen2", {"attention": "torch"}),
        ("odd", {}),
        ("stock", {}),
    ],
)
def test_adapters_are_exchanged_to_the_last_bit(
    family: str,
    settings: dict[str, Any],
    tiny_checkpoint: Callable[[str], Path],
    stock_checkpoint: Path,
    tmp_path: Path,
) -> None:
    """An engine that has had other adapters answers as one that never had; so does the base after all of them."""
    checkpoint = stock_checkpoint if family == "stock" else tiny_checkpoint(family)
    targets = ["q_proj", "k_proj"] if family == "stock" else ["q_proj", "v_proj", "down_proj"]
    first = save_adapter(checkpoint, tmp_path / "a", 1, target_modules=targets)
    second = save_adapter(checkpoint, tmp_path / "b", 2, target_modules=[*targets[1:], "o_proj"], r=9)
    engine = load(checkpoint, first, keeps_base=True, **settings)
    for adapter in (first, second, None, second, first):
        engine.use_adapter(None if adapter is None else Adapter.find(adapter))
        assert scores(engine) == scores(load(checkpoint, adapter, **settings))


def test_an_adapter_that_does_not_fit_leaves_the_one_in_use(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = save_adapter(tiny_checkpoint("llama"), tmp_path / "a")
    other = save_adapter(tiny_checkpoint("mistral"), tmp_path / "b")
    engine = load(tiny_checkpoint("llama"), adapter, keeps_base=True)
    before = scores(engine)
    with pytest.raises(
        ModelError, match=r"an update of \(64, 160\) weights, the model has \(96, 160\), it was made for"
    ):
        engine.use_adapter(Adapter.find(other))
    assert scores(engine) == before


def test_an_exchange_makes_room_first(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU holds base, layers and KV, and seldom another copy of the layers."""
    engine = load(tiny_checkpoint("llama"), keeps_base=True)
    kind, old = type(engine._runner.attention), weakref.ref(engine._model.base.layers[0])
    make_layers = kind.make_layers

    def make_where_old_ones_are_gone(backend: Any, weights: Any) -> Any:
        assert old() is None
        return make_layers(backend, weights)

    monkeypatch.setattr(kind, "make_layers", make_where_old_ones_are_gone)
    engine.use_adapter(Adapter.find(save_adapter(tiny_checkpoint("llama"), tmp_path)))


def test_an_exchange_is_a_call_of_its_own(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama")
    adapter = Adapter.find(save_adapter(checkpoint, tmp_path / "a"))
    with pytest.raises(ConfigError, match="loaded with keeps_base=True"):
        load(checkpoint).use_adapter(adapter)
    engine = load(checkpoint, keeps_base=True)
    asked = [Request(request_id=str(i), token_ids=[5 + i], max_new_tokens=3 + i) for i in range(4)]

    def begin() -> Iterator[Completion]:
        run = engine.run_plan(asked, plan_prefix_groups([request.token_ids for request in asked]))
        next(run)
        return run

    run = begin()
    with ThreadPoolExecutor(1) as other, pytest.raises(BusyError, match="a call of thread 'MainThread' is under way"):
        other.submit(engine.use_adapter, adapter).result()
    assert engine.adapter is None
    assert len(list(run)) == 3
    run = begin()
    engine.use_adapter(adapter)
    with pytest.raises(BusyError, match="another call of the engine has begun, which ended this one"):
        list(run)
    assert engine.adapter == adapter


def test_encoders_take_adapters(tmp_path: Path) -> None:
    checkpoint = save_modules(save_encoder("bert", tmp_path / "bert"), "pooling_mode_cls_token", normalize=False)
    adapter = save_adapter(checkpoint, tmp_path / "a", kind=AutoModel, target_modules=["query", "dense"])
    merged = merged_by_peft(checkpoint, adapter, kind=AutoModel)
    check_adapter(Adapter.find(adapter), checkpoint)
    engine = EncoderEngine.load(checkpoint, EngineConfig(dtype="float32", device="cpu"), adapter=Adapter.find(adapter))
    prompts = [[5, 6, 7, 8], [9, 10]]
    asked = [Request(request_id=str(i), token_ids=p, mode="embed", normalize=False) for i, p in enumerate(prompts)]
    for prompt, completion in zip(prompts, engine.pool(asked), strict=True):
        with torch.inference_mode():
            expected = merged(torch.tensor([prompt])).last_hidden_state[0, 0].numpy()
        assert np.abs(completion.embedding - expected).max() < 2e-5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "LOHA"}, "it is of type 'LOHA', only LORA is supported"),
        ({"use_dora": True}, "DoRA not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules that are trained in full \(modules_to_save\) not supported"),
        ({"bias": "lora_only", "lora_bias": True}, r"biases of the low-rank products.*, trained biases \(bias='lora_o"),
        ({"init_lora_weights": "pissa"}, r"a changed base \(init_lora_weights='pissa'\)"),
        ({"target_parameters": ["experts.down_proj"]}, r"no linear layers \(target_parameters\) not supported"),
        ({"trainable_token_indices": [3]}, "trained embeddings"),
    ],
)
def test_what_is_more_than_lora_is_refused_by_name(
    changes: dict[str, Any], reason: str, tiny_llama: Path, tmp_path: Path
) -> None:
    config = save_adapter(tiny_llama, tmp_path) / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ModelError, match=rf"adapter '{tmp_path}': .*{reason}"):
        Adapter.find(tmp_path)


@pytest.mark.parametrize(
    ("kept", "shapes", "reason"),
    [
        ("layers.1.mlp.down_proj", {"a": (4, 160), "b": (96, 5)}, "factors of one rank are missing"),
        ("layers.1.mlp.down_proj", {"a": (5, 160), "b": (96, 5)}, "rank 5, adapter_config.json says 4"),
        ("layers.1.mlp.down_proj", {"a": (4, 161), "b": (96, 4)}, r"\(96, 161\) weights, the model has \(96, 160\)"),
        ("layers.1.mlp.down_proj", {"a": (4, 160)}, "factors of one rank are missing, got {'A': "),
        ("layers.9.mlp.down_proj", {"a": (4, 160), "b": (96, 4)}, "the model has no such module, it was made for"),
        ("norm", {"a": (4, 96), "b": (96, 4)}, "a LlamaRMSNorm is not supported"),
    ],
)
def test_targets_that_do_not_fit_are_named_before_any_work(
    kept: str, shapes: dict[str, tuple[int, int]], reason: str, tiny_llama: Path, tmp_path: Path
) -> None:
    save_adapter(tiny_llama, tmp_path)
    name = f"base_model.model.model.{kept}"
    tensors = {f"{name}.lora_{kind.upper()}.weight": torch.ones(shape) for kind, shape in shapes.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=rf"adapter '{tmp_path}': model\.{kept}: .*{reason}"):
        check_adapter(Adapter.find(tmp_path), tiny_llama)


@pytest.mark.parametrize("changes", [{"lora_alpha": "x"}, {"alpha_pattern": ["x"]}, {"rank_pattern": {"(": 4}}])
def test_a_rank_or_alpha_that_cannot_be_read_is_refused(
    changes: dict[str, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    config = save_adapter(tiny_llama, tmp_path) / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ModelError, match=rf"adapter '{tmp_path}': model\..*: adapter_config.json gives no rank or no"):
        check_adapter(Adapter.find(tmp_path), tiny_llama)


def test_embeddings_and_the_output_layer_are_refused(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("qwen2")
    save_adapter(checkpoint, tmp_path / "a", target_modules=["embed_tokens"])
    with pytest.raises(ModelError, match=r"embed_tokens.*: embeddings and output layers are not supported"):
        check_adapter(Adapter.find(tmp_path / "a"), checkpoint)
    save_adapter(checkpoint, tmp_path / "b", target_modules=["lm_head"])
    with pytest.raises(ModelError, match=r"lm_head.*: embeddings and output layers are not supported"):
        check_adapter(Adapter.find(tmp_path / "b"), checkpoint)
    pair = {"A": torch.ones(4, 96), "B": torch.ones(512, 4)}
    tensors = {f"base_model.model.lm_head.lora_{kind}.weight": factor for kind, factor in pair.items()}
    save_file(tensors, tmp_path / "b" / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="lm_head: the output layer is not supported"):
        check_adapter(Adapter.find(tmp_path / "b"), checkpoint)


def test_damaged_and_changed_files_are_named(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the folder holds no adapter_config\.json"):
        Adapter.find(tmp_path)
    save_adapter(tiny_llama, tmp_path)
    found = Adapter.find(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, weights)
    assert Adapter.find(tmp_path).digest != found.digest
    with pytest.raises(ModelError, match="is not the one with which the run began"):
        check_adapter(found, tiny_llama)
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors cannot be read"):
        check_adapter(Adapter.find(tmp_path), tiny_llama)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"adapter_config\.json must hold an object, got list"):
        Adapter.find(tmp_path)


def test_a_second_process_for_prompts_has_no_adapters(tiny_llama: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tiny_llama, tmp_path)
    with pytest.raises(ConfigError, match="disaggregation 'processes' computes without adapters"):
        load(tiny_llama, adapter, disaggregation="processes")
