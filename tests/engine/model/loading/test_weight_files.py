"""Weight files: what is read of them before there is work, and that none of it stays once the weights are packed."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine import Engine, EngineConfig
from engine.encoding.encoder_engine import EncoderEngine
from engine.errors import ModelError
from engine.limits import check_weights
from engine.model.loading import checkpoint
from engine.model.loading.checkpoint import cache_folder, resolve_checkpoint
from engine.model.loading.stock_weights import has_output_layer
from tests.tiny_encoders import save_encoder

SETTINGS = EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 22)


def run_program(text: str) -> None:
    """Runs a program in a process of its own, which has imported nothing."""
    root = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", text], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def list_mapped(folder: Path) -> list[str]:
    """The lines of this process's memory map that name a file of the folder."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_files_are_not_mapped_once_a_model_is_loaded(
    family: str, dtype: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """With the output layer tied to the embedding, and with one of its own."""
    import transformers

    folder = tmp_path / "model"
    stored = "float32" if dtype == "float32" else "bfloat16"  # what is converted is never mapped
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint(family), dtype=stored)
    model.save_pretrained(folder)
    engine = Engine.load(str(folder), EngineConfig(dtype=dtype, device="cpu", kv_memory_bytes=1 << 20))
    assert list_mapped(folder) == []
    assert engine.config.dtype == dtype


def test_a_gguf_file_whose_configuration_cannot_be_kept_names_the_setting(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATCHLOOM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"file/cache, which cannot be written \(Not a dir.*folder in BATCHLOOM_CACHE"):
        resolve_checkpoint(smollm2_gguf)


def test_a_folder_with_a_gguf_file_is_told_to_name_it(smollm2_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the folder holds no config\.json$"):
        resolve_checkpoint(tmp_path)
    with pytest.raises(ModelError, match=f"no config.json; to use its GGUF file, name {smollm2_gguf}$"):
        resolve_checkpoint(smollm2_gguf.parent)


def test_a_gguf_file_is_checked_without_torch(smollm2_folder: Path) -> None:
    """A night with nothing new to do ends before it would be imported."""
    check = (
        "import sys; from pathlib import Path; from engine.config import EngineConfig;"
        "from engine.limits import check_weights;"
        f"check_weights(EngineConfig(), Path({str(smollm2_folder)!r}));"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    run_program(check)


def test_a_gguf_file_is_loaded_and_answers_without_transformers(smollm2_folder: Path) -> None:
    """Which takes seconds to import, as what torch computes sizes of tensors without memory with."""
    program = (
        "import sys; from engine import Engine, EngineConfig, Request;"
        "config = EngineConfig(dtype='quantized', device='cpu', kv_memory_bytes=1 << 22);"
        f"engine = Engine.load({str(smollm2_folder)!r}, config);"
        "(done,) = engine.generate([Request(request_id=0, token_ids=[5, 6, 7], max_new_tokens=4, ignore_eos=True)]);"
        "assert len(done.token_ids) == 4;"
        "assert not {'transformers', 'torch._dynamo'} & set(sys.modules)"
    )
    run_program(program)


def copy_with(source: Path, folder: Path, **changes: object) -> Path:
    """A copy of a checkpoint with changes of its config.json."""
    shutil.copytree(source, folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))
    return folder


def drop(folder: Path, part: str) -> None:
    """Removes the weights with this part of a name from a checkpoint."""
    file = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if part not in name}
    save_file(kept, file, metadata={"format": "pt"})


@pytest.mark.parametrize("num_layers", [1, 3])
def test_other_layers_than_config_json_says_are_refused(num_layers: int, tiny_llama: Path, tmp_path: Path) -> None:
    """transformers leaves out what the files have beyond it, and makes up what they lack."""
    folder = copy_with(tiny_llama, tmp_path / "model", num_hidden_layers=num_layers)
    expected = f"config.json says num_hidden_layers {num_layers}, the weight files hold 2 layers"
    for check in (lambda: check_weights(SETTINGS, folder), lambda: Engine.load(folder, SETTINGS)):
        with pytest.raises(ModelError, match=expected):
            check()
    stock = copy_with(tiny_llama, tmp_path / "stock", num_hidden_layers=num_layers, mlp_bias=False, unknown_key=1)
    with pytest.raises(ModelError, match=expected):
        Engine.load(stock, SETTINGS)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        (
            {"vocab_size": 500},
            r"vocab_size 500, hidden_size 96; the weight model\.embed_tokens\.weight has the shape \[512,",
        ),
        (
            {"intermediate_size": 161},
            r"intermediate_size 161, hidden_size 96; the weight .*gate_proj\.weight has the shape \[160, 96\]",
        ),
        ({"num_key_value_heads": 3}, r"num_key_value_heads x head_dim 48, hidden_size 96; the weight .*k_proj"),
        ({"head_dim": 32}, r"num_attention_heads x head_dim 192, hidden_size 96; the weight .*q_proj"),
        ({"attention_bias": True}, r"attention_bias True, its files have no model.*0\.self_attn\.k_proj\.bias$"),
    ],
)
def test_other_sizes_than_config_json_says_are_refused(
    sizes: dict[str, int], why: str, tiny_llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=why):
        check_weights(SETTINGS, copy_with(tiny_llama, tmp_path / "model", **sizes))


@pytest.mark.parametrize(
    ("place", "value", "kind"),
    [
        ("hidden_size", "96", "whole number"),
        ("num_hidden_layers", [2], "whole number"),
        ("num_key_value_heads", 0, "whole number"),
        ("head_dim", 1.5, "whole number"),
        ("rms_norm_eps", "1e-5", "number"),
        ("rope_theta", 0, "number"),
        ("rope_parameters.rope_theta", -10000.0, "number"),
        ("rope_parameters.rope_theta", float("nan"), "number"),
        ("rope_scaling.factor", "8", "number"),
    ],
)
def test_a_number_that_no_model_can_have_is_named(
    place: str, value: object, kind: str, tiny_llama: Path, tmp_path: Path
) -> None:
    name, _, inner = place.partition(".")
    folder = copy_with(tiny_llama, tmp_path / "model", **{name: {inner: value} if inner else value})
    why = f"model '{folder}': config.json: {inner or name} must be a positive {kind}, got {value!r}"
    for load in (resolve_checkpoint, lambda model: Engine.load(model, SETTINGS)):
        with pytest.raises(ModelError, match=f"^{re.escape(why)}$"):
            load(folder)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_weights_that_files_lack_or_have_too_many_are_named(
    family: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each weight of a layer, by the family's own names."""
    source = tiny_checkpoint(family)
    tensors = load_file(source / "model.safetensors")
    of_layer = [name for name in tensors if name.startswith("model.layers.1.")]
    assert len(of_layer) == {"qwen2": 12, "qwen3": 11}.get(family, 9)
    folder = copy_with(source, tmp_path / "model")
    for name in (*of_layer, "model.norm.weight", "model.embed_tokens.weight"):
        kept = {other: tensor for other, tensor in tensors.items() if other != name}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=rf"its files lack 1 weights, {re.escape(name)} first$"):
            check_weights(SETTINGS, folder)
        save_file(kept | {name: tensors[name][:4]}, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=rf"config.json says .*; the weight {re.escape(name)} has the shape \[4"):
            check_weights(SETTINGS, folder)
    for name in ("model.layers.1.self_attn.o_proj.bias", "model.layers.1.mlp.norm.weight"):
        save_file(tensors | {name: tensors["model.norm.weight"].clone()}, folder / "model.safetensors")
        with pytest.raises(ModelError, match=f"its files have {name}, its configuration says nothing of it"):
            check_weights(SETTINGS, folder)


def test_a_gguf_file_s_sizes_are_those_of_its_tensors(smollm2_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(smollm2_folder, tmp_path / "model")
    check_weights(SETTINGS, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 9}))
    with pytest.raises(
        ModelError, match=r"head_dim 576, hidden_size 576; the weight blk\.0\.attn_k\.weight has the shape"
    ):
        check_weights(SETTINGS, folder)
    (folder / "config.json").write_text(json.dumps(config))
    table = json.loads((folder / "gguf_tensors.json").read_text())
    del table["tensors"]["blk.3.attn_norm.weight"]
    (folder / "gguf_tensors.json").write_text(json.dumps(table))
    with pytest.raises(ModelError, match=r"its files lack 1 weights, blk\.3\.attn_norm\.weight first$"):
        check_weights(SETTINGS, folder)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", r"generation_config\.json cannot be read: "),
        ('{"eos_token_id": "</s>"}', "eos_token_id must be a token id or a list of them, got '</s>'"),
        ('{"eos_token_id": [2, "3"]}', r"eos_token_id must be a token id or a list of them, got \[2, '3'\]"),
    ],
)
def test_an_unusable_generation_config_is_refused(text: str, why: str, tiny_llama: Path, tmp_path: Path) -> None:
    folder = copy_with(tiny_llama, tmp_path / "model")
    (folder / "generation_config.json").write_text(text)
    for check in (lambda: check_weights(SETTINGS, folder), lambda: Engine.load(folder, SETTINGS)):
        with pytest.raises(ModelError, match=why):
            check()


def test_layers_that_predict_further_tokens_are_left_out(tiny_llama: Path, tmp_path: Path) -> None:
    """As GLM 4.5's last one."""
    folder = copy_with(tiny_llama, tmp_path / "model", num_hidden_layers=1, num_nextn_predict_layers=1)
    assert Engine.load(folder, SETTINGS).num_kv_blocks
    check_weights(SETTINGS, folder)


@pytest.mark.parametrize(
    ("family", "key"), [(name, "num_hidden_layers") for name in ("bert", "nomic_bert")] + [("distilbert", "n_layers")]
)
def test_an_encoder_s_layers_are_counted(family: str, key: str, tmp_path: Path) -> None:
    cut = copy_with(save_encoder(family, tmp_path / "whole"), tmp_path / "cut", **{key: 1})
    with pytest.raises(ModelError, match="num_hidden_layers 1, the weight files hold 2 layers"):
        EncoderEngine.load(cut, SETTINGS)


@pytest.mark.parametrize("lost", ["word_embeddings", "layer.1.ffn.lin2.bias", "pre_classifier.weight"])
def test_an_encoder_s_weights_are_not_made_up(lost: str, tmp_path: Path) -> None:
    folder = save_encoder("distilbert", tmp_path / "model", num_classes=2)
    drop(folder, lost)
    with pytest.raises(ModelError, match=rf"its files lack 1 weights, .*{lost}.* first"):
        EncoderEngine.load(folder, SETTINGS)


def test_an_encoder_s_pooler_is_needed_for_classes_alone(tmp_path: Path) -> None:
    """Many checkpoints for embeddings lack it."""
    for num_classes in (0, 2):
        folder = save_encoder("bert", tmp_path / f"{num_classes}", num_classes=num_classes)
        drop(folder, "pooler")
        if num_classes:
            with pytest.raises(ModelError, match=r"its files lack 2 weights, bert\.pooler\.dense\.bias first"):
                EncoderEngine.load(folder, SETTINGS)
        else:
            EncoderEngine.load(folder, SETTINGS)


@pytest.mark.parametrize("num_bytes", [0, 4, 100, -1000])
def test_a_file_that_is_cut_is_named_with_its_size(num_bytes: int, tiny_llama: Path, tmp_path: Path) -> None:
    folder = copy_with(tiny_llama, tmp_path / "model")
    weights = (folder / "model.safetensors").read_bytes()[:num_bytes]
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(ModelError, match=rf"model\.safetensors is damaged or cut at {len(weights):,} bytes: "):
        check_weights(SETTINGS, folder)


def test_a_link_to_a_file_that_is_gone_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    """As in a hub's cache from which files were deleted."""
    folder = copy_with(tiny_llama, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut at 0 bytes: .*No such file"):
        check_weights(SETTINGS, folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut at .*Is a directory"):
        check_weights(SETTINGS, folder)


def test_a_file_that_may_not_be_read_is_not_called_damaged(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **how: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint, "safe_open", refuse)
    with pytest.raises(ModelError, match=r"the weights cannot be read: model\.safetensors: .*Permission denied"):
        check_weights(SETTINGS, tiny_llama)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A variable that is empty counts as unset, by the rules of XDG."""
    for name in ("BATCHLOOM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/batchloom"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/batchloom"
    monkeypatch.setenv("BATCHLOOM_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(Path, "home", lambda: pytest.fail("a user without a home folder"))
    assert cache_folder() == tmp_path / "own"


def test_a_missing_file_of_several_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    """Also where each layer has a weight in the others."""
    folder = copy_with(tiny_llama, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    files = {name: f"model-0000{1 + ('up_proj' in name)}-of-00002.safetensors" for name in tensors}
    for file in {*files.values()}:
        part = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    check_weights(SETTINGS, folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"00002-of-00002\.safetensors is damaged or cut at 0 bytes: .*No such"):
        check_weights(SETTINGS, folder)
    for damaged in ({}, {"weight_map": None}, {"weight_map": ["model.safetensors"]}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(damaged))
        with pytest.raises(ModelError, match=r"index\.json must hold a weight_map with names of files, got "):
            check_weights(SETTINGS, folder)


def test_a_gguf_file_that_is_cut_is_named_with_its_size(smollm2_gguf: Path, tmp_path: Path) -> None:
    whole = smollm2_gguf.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-1000])
    with pytest.raises(ModelError, match=f"cut at {len(whole) - 1000:,} bytes: its tensors end at {len(whole):,}$"):
        resolve_checkpoint(tmp_path / "cut.gguf")
    for num_bytes in (0, 10, 1000):
        (tmp_path / "cut.gguf").write_bytes(whole[:num_bytes])
        with pytest.raises(ModelError, match=f"not a readable GGUF file, or cut at {num_bytes:,} bytes: "):
            resolve_checkpoint(tmp_path / "cut.gguf")


@pytest.mark.parametrize(("family", "is_tied"), [("phi", False), ("gpt_neox", False), ("gemma", True)])
def test_an_output_layer_is_looked_for(family: str, is_tied: bool, tmp_path: Path) -> None:
    """The config.json of many a checkpoint does not say whether it is tied: the architecture's default counts."""
    import transformers

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, vocab_size=64, pad_token_id=0, **sizes)
    )
    for part, expected in ((model, True), (model.base_model, is_tied)):
        part.save_pretrained(tmp_path)
        values = json.loads((tmp_path / "config.json").read_text())
        values.pop("tie_word_embeddings", None)
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert has_output_layer(tmp_path) == expected
