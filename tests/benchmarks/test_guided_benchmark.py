"""The benchmark of typed answers beside guided engines, with batchloom alone; int8 checkpoints for other engines."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks import guided
from benchmarks.peers.w8a8_checkpoint import write_w8a8


def test_it_measures_and_judges(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "guided.json"
    sizes = "--rows 2 --rounds 1 --dtype float32 --threads 1 --kv-tokens 2048 --backends"
    assert guided.main(["--model", str(tiny_llama), "--out", str(out), *sizes.split()]) == 0
    result = json.loads(out.read_text())
    (ours,) = result["engines"].values()
    assert result["versions"]["batchloom"]["torch"] == result["machine"]["versions"]["torch"] == torch.__version__
    assert ours["batchloom_is_times_as_fast"] == 1
    assert sum(ours["verdicts"].values()) == 4
    assert set(ours["verdicts"]) <= {"valid", "not finished"}


def test_a_checkpoint_in_int8_is_near_its_model(tiny_llama: Path, tmp_path: Path) -> None:
    folder = write_w8a8(tiny_llama, tmp_path)
    before, after = (load_file(path / "model.safetensors") for path in (tiny_llama, folder))
    projections = [name for name in before if name.endswith("_proj.weight")]
    assert len(projections) == 14
    for name in projections:
        assert after[name].dtype == torch.int8
        scale = after[f"{name}_scale"]
        assert scale.shape == (len(before[name]), 1)
        assert ((after[name] * scale - before[name]).abs() <= scale * 0.501).all()
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert write_w8a8(tiny_llama, tmp_path) == folder
