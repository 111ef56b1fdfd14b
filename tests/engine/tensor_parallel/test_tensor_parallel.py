"""A model spread over ranks gives the answers of the whole model, and a rank that fails costs no row."""

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from engine import Completion, Engine, EngineConfig, Request
from engine.conflicts import check_gpus
from engine.encoding.encoder_engine import EncoderEngine
from engine.errors import BatchloomError, ConfigError, ModelError
from engine.execution.step_record import StepRecord
from engine.kv.kv_cache import KVShape
from engine.model.loading.checkpoint import resolve_checkpoint
from engine.model.shard import Shard
from engine.model.sharded_model import ShardedModel, divide_config
from engine.planning.prefix_groups import plan_prefix_groups
from engine.tensor_parallel.ranks import RankFailure, RankMemoryFailure, Ranks, rank_devices
from tasks.partitions.engine_host import EngineHost
from tasks.partitions.out_of_memory import is_out_of_memory
from tasks.workloads.workload import load_workload
from tests.engine.answers import assert_alike
from tests.engine.tensor_parallel.thread_ranks import two_ranks
from tests.sources import make_job

WHOLE = EngineConfig(
    dtype="float32", device="cpu", attention="torch", block_size=4, kv_memory_bytes=1 << 22, max_num_batched_tokens=50,
    num_threads=1,
)  # fmt: skip
SPREAD = dataclasses.replace(WHOLE, tensor_parallel_size=2)


def make_requests() -> list[Request]:
    """Prompts that share beginnings; greedy, drawn, and scored."""
    generator = torch.Generator().manual_seed(7)
    requests = []
    for index in range(9):
        tail = torch.randint(3, 500, (4 + index,), generator=generator).tolist()
        answer: dict[str, Any] = {"max_new_tokens": 6}
        if index % 4 == 3:
            answer = {"mode": "score", "labels": ((5,), (6, 7), (6, 8, 9))}
        elif index % 4 == 2:
            answer |= {"temperature": 0.8, "seed": index}
        prompt = [*range(10 + index // 3, 40 + index // 3), *tail]
        requests.append(Request(request_id=str(index), token_ids=prompt, **answer))
    return requests


REQUESTS = make_requests()


def run(engine: Engine, steps: list[StepRecord] | None = None) -> dict[str, Completion]:
    groups = plan_prefix_groups([request.token_ids for request in REQUESTS])
    found = engine.run_plan(REQUESTS, groups, on_step=None if steps is None else steps.append)
    return {answer.request_id: answer for answer in found}


@pytest.mark.parametrize(("family", "overlaps_steps"), [("llama", False), ("qwen2", True), ("qwen3", False)])
def test_two_ranks_give_the_answers_of_one(
    tiny_checkpoint: Callable[[str], Path], family: str, overlaps_steps: bool
) -> None:
    """Running ahead, the second rank is told by the first one which tokens only that rank's device knows."""
    folder = tiny_checkpoint(family)
    expected = run(Engine.load(folder, WHOLE))
    with two_ranks(folder, SPREAD) as (engine, meeting):
        engine._overlaps_steps = overlaps_steps
        assert_alike(run(engine), expected)
        assert engine.num_kv_blocks == 2 * Engine.load(folder, WHOLE).num_kv_blocks, "each has half of the KV heads"
    assert meeting.num_sums[0] == meeting.num_sums[1] > 0
    assert meeting.num_sums[0] % 4 == 0, "two sums in each of two layers"


def test_ranks_that_lose_memory_preempt_alike(tiny_llama: Path) -> None:
    tight = {"kv_memory_bytes": 7 * 4 * 2 * 2 * 2 * 16 * 4, "output_reserve": 0.0}
    expected = run(Engine.load(tiny_llama, WHOLE))
    with two_ranks(tiny_llama, dataclasses.replace(SPREAD, **tight)) as (engine, _):  # type: ignore[arg-type]
        steps: list[StepRecord] = []
        assert_alike(run(engine, steps), expected)
    assert sum(step.num_preempted_requests for step in steps) > 0


@pytest.mark.slow
def test_ranks_are_processes_and_one_that_fails_is_replaced(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is killed, then one that fails, end a run with a line that says so; the next use loads all anew."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    expected = run(Engine.load(tiny_llama, WHOLE))
    host, processes = EngineHost(), []
    job = make_job("", load_workload("snippets"), tiny_llama, engine=SPREAD)
    for reason in ("rank 1 of 2 of the model .* is gone; its exit status is -9", "rank 1 of 2: AttributeError: "):
        with host.use(job) as loaded:
            engine = loaded.engine
            assert isinstance(engine, Engine)
            assert_alike(run(engine), expected)
            ranks = engine._model.shard
            assert isinstance(ranks, Ranks)
            ((line, process),) = ranks._workers
            assert process.poll() is None
            assert not list(tmp_path.iterdir()), "whatever becomes of this process, it leaves no folder"
            processes.append(process)
            if "-9" in reason:
                process.kill()
            else:
                line.send(None)  # no step
            with pytest.raises(RankFailure, match=reason):
                run(engine)
            assert not engine.is_usable
            assert process.poll() is not None
    with host.use(job) as loaded:
        assert loaded.engine is not engine
        assert loaded.engine.is_usable
        ranks = loaded.engine._model.shard  # type: ignore[union-attr]
        assert isinstance(ranks, Ranks)
        processes.append(ranks._workers[0][1])
    del loaded, engine
    host.release()
    assert [process.wait(20) is not None for process in processes] == [True] * 3


def test_a_failure_of_a_rank_is_one_that_rows_are_tried_again_after() -> None:
    assert not issubclass(RankFailure, BatchloomError)
    assert not is_out_of_memory(RankFailure("gone"))
    assert is_out_of_memory(RankMemoryFailure("too little")), "less memory is taken, then the rows are tried again"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "quantized"}, "dtype 'quantized' does not go with a model on 2 devices"),
        ({"keep_prefixes_bytes": 1 << 20}, "keep_prefixes_bytes 1048576 does not go with a model on 2 devices"),
        ({"dtype": "int8"}, "dtype 'int8' does not go with a model on 2 devices"),
        ({"preemption": "swap"}, "preemption 'swap' does not go with a model on 2 devices"),
        ({"disaggregation": "processes"}, "disaggregation 'processes' does not go with"),
        ({"attention": "native"}, "attention 'native' does not go with .*: set attention to auto, or torch on a CPU"),
        ({"compile": "always"}, "compile 'always' does not go with"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
    ],
)
def test_what_knows_one_device_only_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**({"tensor_parallel_size": 2} | settings))


def test_a_model_that_does_not_divide_is_refused(tiny_checkpoint: Callable[[str], Path]) -> None:
    mistral = transformers.AutoConfig.from_pretrained(tiny_checkpoint("mistral"))
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 does not divide the model's num_key_value_heads, 1"):
        divide_config(mistral, 2)
    llama = transformers.AutoConfig.from_pretrained(tiny_checkpoint("llama"))
    share = divide_config(llama, 2)
    assert (share.num_attention_heads, share.num_key_value_heads, share.head_dim) == (3, 1, 16)
    assert (share.hidden_size, share.intermediate_size, llama.intermediate_size) == (96, 80, 160)


def load_share(folder: Path, size: int = 2) -> ShardedModel:
    shard = Shard(1, size, torch.device("cpu"))
    return ShardedModel.load_share(resolve_checkpoint(folder), dtype=torch.float32, device=shard.device, shard=shard)


def test_a_rank_reads_its_share_alone(tiny_llama: Path) -> None:
    made = load_share(tiny_llama)
    assert made.kv_shape == KVShape(num_layers=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    layer, expected = made.base.layers[1], whole.model.layers[1]
    assert torch.equal(layer.self_attn.q_proj.weight, expected.self_attn.q_proj.weight[48:])
    assert torch.equal(layer.self_attn.v_proj.weight, expected.self_attn.v_proj.weight[16:])
    assert torch.equal(layer.self_attn.o_proj.weight, expected.self_attn.o_proj.weight[:, 48:])
    assert torch.equal(layer.mlp.down_proj.weight, expected.mlp.down_proj.weight[:, 80:])
    assert torch.equal(layer.input_layernorm.weight, expected.input_layernorm.weight)
    assert torch.equal(made.base.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq)
    plan = transformers.AutoConfig.from_pretrained(tiny_llama).base_model_tp_plan
    summed = {name.rpartition(".")[2] for name, kind in plan.items() if kind == "rowwise"}
    assert summed == {"o_proj", "down_proj"}, "transformers adds up the same products"


def test_a_rank_reads_its_share_of_a_gguf_file(smollm2_gguf: Path, smollm2_unpacked: Path) -> None:
    made = load_share(smollm2_gguf, 3)
    with safe_open(smollm2_unpacked / "model.safetensors", "pt") as weights:
        expected = weights.get_tensor("model.layers.1.self_attn.q_proj.weight").chunk(3)[1]
    assert torch.equal(made.base.layers[1].self_attn.q_proj.weight, expected)


def test_a_damaged_or_foreign_checkpoint_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\1" * 100)
    with pytest.raises(ModelError, match="the weights cannot be read"):
        load_share(tmp_path / "damaged")
    shutil.copytree(tiny_llama, tmp_path / "other")
    config = (tmp_path / "other" / "config.json").read_text().replace('"silu"', '"gelu"')
    (tmp_path / "other" / "config.json").write_text(config)
    with pytest.raises(ModelError, match="tensor_parallel_size 2 is for plain models of the types llama, mistral"):
        load_share(tmp_path / "other")
    quantized = '{"quantization_config": {"quant_method": "awq"},'
    config = (tiny_llama / "config.json").read_text().replace("{", quantized, 1)
    (tmp_path / "other" / "config.json").write_text(config)
    with pytest.raises(ModelError, match="tensor_parallel_size 2 is not for quantized weights"):
        load_share(tmp_path / "other")


def test_models_of_other_kinds_are_refused(tiny_llama: Path) -> None:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama)
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 needs a checkpoint that all ranks load"):
        Engine.load(loaded, SPREAD)
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 computes without adapters"):
        Engine.load(tiny_llama, SPREAD, keeps_base=True)
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 is for decoders, this is an encoder"):
        EncoderEngine.load(tiny_llama, SPREAD)


def test_heads_that_cannot_be_divided_are_refused_before_a_process_starts(
    tiny_llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 4 does not divide the model's num_attention_heads, 6"):
        Engine.load(tiny_llama, dataclasses.replace(SPREAD, tensor_parallel_size=4))
    assert capfd.readouterr().err == ""


def test_ranks_take_the_gpus_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_devices(torch.device("cuda"), 2) == ["cuda:0", "cuda:1"]
    assert rank_devices(torch.device("cuda", 2), 2) == ["cuda:2", "cuda:3"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    check_gpus(dataclasses.replace(SPREAD, device="cuda:1"))
    check_gpus(SPREAD)
    for name, size in (("cuda:2", 2), ("auto", 4)):
        with pytest.raises(ConfigError, match=f"tensor_parallel_size {size}, device '{name}': torch finds 3 GPUs here"):
            check_gpus(EngineConfig(device=name, tensor_parallel_size=size))
