"""Quantized safetensors checkpoints: weights stay in the file's codes, and answers are those of what they stand for."""

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine, EngineConfig, Request
from engine.errors import ModelError, RequestError
from engine.limits import check_weights
from engine.model.proof.tiny_model import make_tiny_model, shrink
from engine.model.quantized.quantized_model import QuantizedModel
from tests.engine.model.families import make_config

PROMPTS = [[(7 * i) % 490 + 3 for i in range(60)], [4] * 40, [9]]

PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
WEIGHTS = {"type": "int", "num_bits": 4, "strategy": "group", "symmetric": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
BYTES = {"weights": WEIGHTS | {"num_bits": 8, "strategy": "channel"}, "input_activations": {"num_bits": 8}}
ASYMMETRIC = PACKED | {"config_groups": {"group_0": {"weights": WEIGHTS | {"symmetric": False}}}}
METHODS: dict[str, tuple[dict[str, Any], int, torch.dtype]] = {
    "int4": (PACKED | {"config_groups": {"group_0": {"weights": WEIGHTS}}}, 128, torch.bfloat16),
    "int4 with zeros": (ASYMMETRIC, 32, torch.bfloat16),
    "int4 with zeros in bytes": (ASYMMETRIC, 128, torch.bfloat16),
    "int8": (PACKED | {"format": "int-quantized", "config_groups": {"group_0": BYTES}}, 0, torch.bfloat16),
    "awq": (AWQ, 128, torch.float16),
    "gptq": (GPTQ, 32, torch.float16),
}
"""The configuration, the weights of a group (0: a column), and the dtype of scales."""


def packed(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """``[..., 8 n]`` -> int32 ``[..., n]``: code order[i] of eight in bits 4 i."""
    eights = codes.long().unflatten(-1, (-1, 8))
    words = sum(eights[..., place] << (4 * i) for i, place in enumerate(order))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).int().contiguous()


def quantized(
    name: str, shape: torch.Size, method: str, generator: torch.Generator
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random tensors of a linear layer, and the weights that they stand for."""
    config, group, dtype = METHODS[method]
    num_columns, depth = shape
    num_groups = depth // group if group else 1
    num_bits = 8 if method == "int8" else 4
    codes = torch.randint(0, 1 << num_bits, (num_columns, depth), generator=generator)
    scales = (torch.rand(num_columns, num_groups, generator=generator) * 0.03 + 0.005).to(dtype)
    if num_bits == 8:
        scales /= 16
    zeros = torch.full((num_columns, num_groups), 1 << (num_bits - 1))
    if method not in ("int4", "int8"):
        zeros = torch.randint(0, 16, (num_columns, num_groups), generator=generator)
    length = depth // num_groups
    weights = (codes - zeros.repeat_interleave(length, dim=1)) * scales.float().repeat_interleave(length, dim=1)
    tensors: dict[str, torch.Tensor]
    if method == "int8":
        tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
    elif config["quant_method"] == "compressed-tensors":
        tensors = {"weight_packed": packed(codes), "weight_scale": scales, "weight_shape": torch.tensor(shape)}
        if method == "int4 with zeros":
            tensors["weight_zero_point"] = packed(zeros.T).T.contiguous()
        elif method == "int4 with zeros in bytes":  # as llm-compressor wrote them at first
            tensors["weight_zero_point"] = (zeros - 8).to(torch.int8)
    elif method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {"qweight": packed(codes.T, order), "qzeros": packed(zeros.T, order), "scales": scales.T.contiguous()}
    else:
        tensors = {
            "qweight": packed(codes).T.contiguous(),
            "qzeros": packed(zeros.T - 1),
            "scales": scales.T.contiguous(),
        }
        tensors["g_idx"] = torch.arange(depth).int() // length
    return {f"{name}.{part}": tensor for part, tensor in tensors.items()}, weights


def write(checkpoint: Path, folder: Path, method: str) -> tuple[Path, Path]:
    """A quantized checkpoint, and one of the same weights in float32; embeddings and output layer are as they were."""
    found, plain = folder / "quantized", folder / "plain"
    generator = torch.Generator().manual_seed(5)
    shutil.copytree(checkpoint, found)
    shutil.copytree(checkpoint, plain)
    tensors: dict[str, torch.Tensor] = {}
    unpacked: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if name.endswith(("_proj.weight", "c_fc.weight")):
            made, unpacked[name] = quantized(name.removesuffix(".weight"), tensor.shape, method, generator)
            tensors |= made
        else:
            tensors[name] = tensor.bfloat16()
            unpacked[name] = tensor.bfloat16().float()
    save_file(tensors, found / "model.safetensors", metadata={"format": "pt"})
    save_file(unpacked, plain / "model.safetensors", metadata={"format": "pt"})
    configure(found, METHODS[method][0])
    return found, plain


@pytest.fixture(scope="module")
def written(
    shaped: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[Path, Path]]:
    """Gives the two checkpoints of a method and a family, made once; not to be changed."""
    return cache(lambda method, family: write(shaped(family), tmp_path_factory.mktemp("written"), method))


@pytest.fixture
def copied(written: Callable[[str, str], tuple[Path, Path]], tmp_path: Path) -> Callable[[str], Path]:
    """Gives a copy of a method's quantized Llama, which may be changed."""
    return lambda method: Path(shutil.copytree(written(method, "llama")[0], tmp_path / "quantized"))


def configure(folder: Path, quantization: dict[str, Any] | str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def load(checkpoint: Path, **settings: Any) -> Engine:
    return Engine.load(checkpoint, EngineConfig(**{"device": "cpu", "kv_memory_bytes": 1 << 22} | settings))


def answers_of(engine: Engine) -> list[object]:
    most = engine.vocab_size
    requests = [
        Request(
            request_id=str(i),
            token_ids=[token % most for token in prompt],
            mode="score",
            labels=((5,), (9, 11), (9, 400 % most, 3)),
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    return [answer.label_logprobs for answer in engine.score(requests)]


@pytest.mark.parametrize(("method", "family"), [*((method, "llama") for method in METHODS), ("int4", "qwen2")])
def test_answers_are_those_of_what_the_codes_stand_for(
    method: str, family: str, computed: str, written: Callable[[str, str], tuple[Path, Path]]
) -> None:
    """Equal to the last bit to engines of the unpacked weights."""
    found, plain = written(method, family)
    engine = load(found)
    expected = answers_of(load(plain, dtype=computed))
    if computed == "float32":  # torch computes its output layer, which has 500 columns
        expected = [pytest.approx(each, abs=1e-6) for each in expected]
    assert answers_of(engine) == expected
    most_bytes = 1.1 if computed == "bfloat16" else 2.0  # the embedding's bfloat16 becomes float32
    assert engine._model.weight_bytes < most_bytes * (found / "model.safetensors").stat().st_size


def test_a_worker_keeps_weights_quantized_as_its_parent_does(
    written: Callable[[str, str], tuple[Path, Path]],
) -> None:
    found, _ = written("awq", "llama")
    expected = answers_of(load(found, deterministic=True))
    assert answers_of(load(found, deterministic=True, disaggregation="processes")) == expected


@pytest.mark.parametrize(
    ("method", "family"),
    [
        ("gptq", "gemma2"),
        ("int4 with zeros", "gemma3_text"),
        ("awq", "qwen3_moe"),
        ("int8", "starcoder2"),
        ("gptq", "qwen3_moe"),
    ],
)
def test_so_are_those_of_families_with_more_operations(
    method: str, family: str, computed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "awq", (AWQ | {"group_size": 32}, 32, torch.float16))  # sizes here are small
    make_tiny_model(shrink(make_config(family))).save_pretrained(tmp_path / "tiny")
    found, plain = write(tmp_path / "tiny", tmp_path, method)
    engine = load(found)
    assert type(engine._model) is QuantizedModel
    assert answers_of(engine) == answers_of(load(plain, dtype=computed))


@pytest.mark.parametrize(
    ("method", "change", "reason"),
    [
        ("awq", {"version": "gemv"}, "awq with 4 bits, version gemv, zero_point True"),
        ("gptq", {"desc_act": True}, "gptq with 4 bits, desc_act True, checkpoint_format gptq"),
        ("gptq", {"bits": 3}, "gptq with 3 bits, desc_act False, checkpoint_format gptq"),
        ("int4", {"format": "float-quantized"}, "compressed-tensors with format float-quantized"),
        (
            "int4",
            {"config_groups": {"group_0": {"weights": WEIGHTS | {"num_bits": 8}}}},
            "compressed-tensors with format pack-quantized, symmetric weights of type int, 8 bits, strategy group",
        ),
        ("int4", {"config_groups": {"W4A16": ["x"]}}, "compressed-tensors with config_groups {'W4A16': ['x']}"),
        (
            "int4",
            {"config_groups": {"a": {"weights": "int4"}}},
            "compressed-tensors with config_groups {'a': {'weights': 'int4'}}",
        ),
        (
            "int4",
            {"transform_config": {"config_groups": {"R4": {"type": "hadamard"}}}},
            "compressed-tensors with transform_config {'config_groups': {'R4': {'type': 'hadamard'}}}",
        ),
        ("int4", {"sparsity_config": "2:4"}, "compressed-tensors with sparsity_config 2:4"),
        (
            "int4",
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "compressed-tensors with sparsity_config {'format': 'sparse-24-bitmask'}",
        ),
    ],
)
def test_what_is_not_covered_is_refused_by_name(
    method: str, change: dict[str, Any], reason: str, tiny_llama: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_llama, tmp_path / "other")
    configure(tmp_path / "other", METHODS[method][0] | change)
    for dtype in ("auto", "quantized"):
        with pytest.raises(ModelError) as refused:
            load(tmp_path / "other", dtype=dtype)
        assert str(refused.value) == f"model {str(tmp_path / 'other')!r}: dtype 'quantized': {reason}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (None, "there is no tensor {name}"),
        (lambda zeros: zeros.short(), "tensor {name} has format I16 and shape [256, 2]"),
        (lambda zeros: zeros.T.contiguous(), "tensor {name} has format I8 and shape [2, 256]"),
    ],
)
def test_zero_points_that_cannot_be_read_are_refused_by_name(
    change: Callable[[torch.Tensor], torch.Tensor] | None, reason: str, copied: Callable[[str], Path]
) -> None:
    folder = copied("int4 with zeros in bytes")
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.self_attn.q_proj.weight_zero_point"
    zeros = tensors.pop(name)
    if change is not None:
        tensors[name] = change(zeros)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as refused:
        load(folder)
    assert str(refused.value) == f"model {str(folder)!r}: dtype 'quantized': {reason.format(name=name)}"


UP, NORM = "model.layers.0.mlp.up_proj", "model.norm.weight"


@pytest.mark.parametrize(
    ("method", "changes", "reason"),
    [
        ("awq", {f"{UP}.qzeros": None}, f"dtype 'quantized': there is no tensor {UP}.qzeros"),
        ("gptq", {f"{UP}.qzeros": torch.zeros(8, 63).int()}, f"tensor {UP}.qzeros has format I32 and shape [8, 63]"),
        ("gptq", {f"{UP}.g_idx": torch.arange(255, -1, -1).int() // 32}, "gptq with weights out of order (g_idx)"),
        ("int4", {f"{UP}.weight_packed": None}, f"{UP} has scales without codes"),
        ("int4", {f"{UP}.weight_packed": torch.zeros(512 * 32).int()}, f"{UP} has scales without codes"),
        (
            "int4",
            {f"{UP}.weight_scale": torch.ones(496, 2).bfloat16()},
            f"tensor {UP}.weight_scale has shape [496, 2], expected 512 columns",
        ),
        ("int8", {NORM: torch.ones(256).double()}, f"tensor {NORM} has format F64"),
        ("int8", {NORM: torch.ones(128)}, "norm has a weight of 128, config.json says 256"),
        (
            "int4",
            {"model.embed_tokens.weight": torch.ones(480, 256)},
            "embedding or output layer has a matrix of (480, 256), config.json says (500, 256)",
        ),
    ],
)
def test_tensors_that_are_missing_or_of_another_size_are_named(
    method: str, changes: dict[str, torch.Tensor | None], reason: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(method)
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{re.escape(reason)}$"):
        load(folder)


def test_a_table_of_groups_without_numbers_is_none(copied: Callable[[str], Path]) -> None:
    """Some GPTQ files have one of zeros, though their groups lie side by side."""
    folder = copied("gptq")
    expected, tensors = answers_of(load(folder)), load_file(folder / "model.safetensors")
    tensors |= {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if name.endswith("g_idx")}
    save_file(tensors, folder / "model.safetensors")
    assert answers_of(load(folder)) == expected


@pytest.mark.parametrize(
    ("method", "name"),
    [("gptq", f"{UP}.bias"), ("awq", "model.layers.1.self_attn.q_norm.weight"), ("int4", f"{UP}.bias")],
)
def test_a_bias_or_a_norm_that_would_not_be_read_is_named(
    method: str, name: str, copied: Callable[[str], Path]
) -> None:
    """AutoGPTQ wrote biases of zeros for layers without any, which change nothing."""
    folder = copied(method)
    expected, tensors = answers_of(load(folder)), load_file(folder / "model.safetensors")
    zeros = {f"{UP}.bias": torch.zeros(512).half(), "lm_head.bias": torch.zeros(500).half()}
    save_file(tensors | zeros, folder / "model.safetensors")
    assert answers_of(load(folder)) == expected
    save_file(tensors | {name: torch.ones(512).half()}, folder / "model.safetensors")
    for check in (lambda: check_weights(EngineConfig(device="cpu"), folder), lambda: load(folder)):
        with pytest.raises(ModelError, match=rf"its files have {name}, its configuration says nothing of it"):
            check()


def test_an_output_layer_is_not_made_up(copied: Callable[[str], Path]) -> None:
    folder = copied("int4")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(RequestError, match="the checkpoint has no output layer"):
        answers_of(load(folder))


def test_a_method_that_is_no_object_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny_llama, folder)
    configure(folder, "awq")
    for check in (lambda: check_weights(EngineConfig(), folder), lambda: load(folder)):
        with pytest.raises(ModelError, match=r"config\.json: quantization_config must be an object, got 'awq'"):
            check()


def test_weights_by_other_names_in_a_second_file_are_left_out(copied: Callable[[str], Path]) -> None:
    """As in the repositories of Mistral."""
    folder = copied("int4")
    expected = answers_of(load(folder))
    scales = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight_scale"]
    save_file({"layers.0.feed_forward.w3.weight_scale": scales}, folder / "consolidated.safetensors")
    assert answers_of(load(folder)) == expected


def test_unpacking_by_name_is_refused_before_any_work(tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny_llama, folder)
    configure(folder, METHODS["awq"][0])
    message = "dtype 'float32': only weights of GGUF files are unpacked; dtype auto keeps these quantized"
    with pytest.raises(ModelError, match=message):
        check_weights(EngineConfig(dtype="float32"), folder)
    with pytest.raises(ModelError, match=message):
        load(folder, dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_transformers_unpacks_have_the_type_asked_for(
    dtype: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """Block-wise fp8, beside which transformers leaves other weights in the type of the file."""
    tensors, plain, quantized = load_file(tiny_llama / "model.safetensors"), tmp_path / "plain", tmp_path / "fp8"
    unpacked = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    packed = dict(unpacked)
    for name in [name for name in tensors if "proj" in name]:
        scale = tensors[name].abs().max() / 448
        packed[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        packed[f"{name}_scale_inv"] = scale.reshape(1, 1)
        unpacked[name] = packed[name].float() * scale
    for folder, found in ((plain, unpacked), (quantized, packed)):
        shutil.copytree(tiny_llama, folder)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    configure(quantized, {"quant_method": "fp8", "weight_block_size": [256, 256], "activation_scheme": "dynamic"})
    assert answers_of(load(quantized, dtype=dtype)) == answers_of(load(plain, dtype=dtype))


def test_a_method_that_nobody_knows_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny_llama, folder)
    configure(folder, {"quant_method": "magic"})
    with pytest.raises(ModelError, match="the weights are quantized by 'magic', which transformers does not know"):
        load(folder)
