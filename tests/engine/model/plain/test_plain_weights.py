"""Weights of plain models: those of the files, each of them, or the reason why not."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine import Engine, EngineConfig
from engine.errors import ModelError
from engine.model.plain.plain_checkpoint import load_plain, read_plain_config

ROOT = Path(__file__).parents[4]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, bool]:
    config = read_plain_config(folder)
    assert config is not None
    return load_plain(folder, config, dtype=dtype, device=torch.device("cpu"))


@pytest.fixture
def copied(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    def copy(family: str) -> Path:
        return Path(shutil.copytree(tiny_checkpoint(family), tmp_path / family))

    return copy


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_the_file_s(family: str, dtype: torch.dtype, tiny_checkpoint: Callable[[str], Path]) -> None:
    found, has_output_layer = load(tiny_checkpoint(family), dtype)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint(family), dtype=dtype)
    assert has_output_layer
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def test_a_checkpoint_in_several_files(copied: Callable[[str], Path]) -> None:
    folder = copied("qwen3")
    expected = load(folder)[0].state_dict()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    found = load(folder)[0].state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_files_in_another_form_beside_it_are_not_read(copied: Callable[[str], Path]) -> None:
    """As Mistral's are published: all weights a second time, by other names."""
    folder = copied("mistral")
    expected = load(folder)[0].state_dict()
    names = ("norm.weight", "tok_embeddings.weight", "model.norm.weight")
    save_file({name: torch.zeros(4) for name in names}, folder / "consolidated.safetensors")
    found = load(folder)[0].state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_second_file_of_weights_beside_it_is_not_read(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    expected = load(folder)[0].state_dict()
    others = {name: 2 * tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(others, folder / "model_old.safetensors")
    found = load(folder)[0].state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("is_base", [False, True])
def test_a_checkpoint_without_an_output_layer(is_base: bool, copied: Callable[[str], Path]) -> None:
    folder = copied("mistral")
    expected = load(folder)[0].state_dict()

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]
        for name in [*tensors] if is_base else ():
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(folder, change)
    found, has_output_layer = load(folder)
    assert not has_output_layer
    assert all(
        torch.equal(found.state_dict()[name], tensor) for name, tensor in expected.items() if "lm_head" not in name
    )


def test_tied_embeddings_by_the_name_of_the_output_layer(copied: Callable[[str], Path]) -> None:
    """Some programs keep this one of the two names."""
    folder = copied("llama")
    expected = load(folder)[0].state_dict()
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    found, has_output_layer = load(folder)
    assert has_output_layer
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("is_other", [True, False])
def test_tied_embeddings_with_an_output_layer_in_the_files(is_other: bool, copied: Callable[[str], Path]) -> None:
    """transformers ties them only where they are equal."""
    folder = copied("llama")

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0 if is_other else ())

    rewrite(folder, add_head)
    found, has_output_layer = load(folder)
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert has_output_layer
    assert torch.equal(found.lm_head.weight, expected.lm_head.weight)
    assert (found.lm_head.weight is found.model.embed_tokens.weight) != is_other


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_rotation_of_parts_of_heads_is_refused(family: str, copied: Callable[[str], Path]) -> None:
    """These classes of transformers rotate whole heads: with such angles, they do not compute."""
    folder = copied(family)
    values = json.loads((folder / "config.json").read_text())
    values["rope_parameters"] |= {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=f"architecture '{family}' is not supported: a tiny model of it cannot be"):
        Engine.load(folder, EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 20))


def test_what_files_lack_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    rewrite(folder, lambda tensors: [tensors.pop(f"model.layers.1.mlp.{name}_proj.weight") for name in ("up", "down")])  # type: ignore[arg-type,return-value]
    with pytest.raises(ModelError, match=r"its files lack 2 weights, model\.layers\.1\.mlp\.down_proj\.weight first$"):
        load(folder)


def test_a_weight_of_another_shape_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"intermediate_size": 170}))
    message = r"says intermediate_size 170, .* model\.layers\.0\.mlp\.gate_proj\.weight has the shape \[160,"
    with pytest.raises(ModelError, match=message):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_weight_of_one_byte_a_value_is_named(dtype: torch.dtype, copied: Callable[[str], Path]) -> None:
    """Such weights have scales, which a plain config says nothing of."""
    folder = copied("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(ModelError, match=rf"the weight {re.escape(name)} is {dtype}, without its scale"):
        load(folder)


def test_a_damaged_file_is_named(copied: Callable[[str], Path]) -> None:
    folder = copied("llama")
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="the weights cannot be read"):
        load(folder)


PROGRAM = """
import sys
from engine import Engine, EngineConfig, Request
for attention in ("native", "torch"):
    config = EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 20, attention=attention)
    engine = Engine.load(sys.argv[1], config)
    (done,) = engine.generate([Request(request_id=0, token_ids=[5, 6, 7], max_new_tokens=4)])
    print(done.token_ids, [name for name in ("transformers", "torch._dynamo") if name in sys.modules])
"""


def test_an_engine_is_loaded_and_answers_without_transformers(tiny_llama: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tiny_llama)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama)
    expected = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)[0, 3:].tolist()
    assert done.stdout == f"{tuple(expected)} []\n" * 2
    assert Engine.load(tiny_llama, EngineConfig(device="cpu", kv_memory_bytes=1 << 20)).eos_token_ids == {2}
