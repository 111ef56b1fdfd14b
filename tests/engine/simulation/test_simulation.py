"""The simulation against the engine itself: the same steps, tokens, memory and preemptions; and what a step costs."""

import dataclasses
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine import Completion, Engine, EngineConfig, PrefixGroup, Request, StepRecord, plan_prefix_groups
from engine.device.free_memory import MOST_CPU_KV_BYTES
from engine.errors import CapacityError, ConfigError, ModelError
from engine.model.model_shape import ModelShape
from engine.planning.prefix_tree import build_prefix_tree
from engine.simulation.device import DEVICES, Roofline, StepWork, match_device
from engine.simulation.device_probe import probe_device
from engine.simulation.simulation import SimulatedStep, find_oversized, simulate_plan, summarize_steps
from tasks.forecast.forecast import Quantiles, measure_shape
from tasks.forecast.hardware import Hardware

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=8,
    intermediate_size=10,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=100,
    has_tied_embeddings=True,
    value_bytes=2,
)
ROOFLINE = Roofline(SHAPE, DEVICES["h200"], "bfloat16")
LABELS = ((5, 6, 7), (8,), (9, 10))


def make_prompts(count: int, seed: int = 5) -> list[list[int]]:
    """Prompts below four documents below an instruction, every fifth of them twice."""
    rng = random.Random(seed)
    documents = [[1] * 9 + [rng.randrange(3, 500) for _ in range(rng.choice([5, 30, 41]))] for _ in range(4)]
    prompts = [
        rng.choice(documents) + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 30))] for _ in range(count)
    ]
    return prompts + prompts[::5]


def simulate(
    requests: list[Request], groups: list[PrefixGroup], engine: Engine, num_answer_tokens: int
) -> list[SimulatedStep]:
    config = engine.config
    return list(
        simulate_plan(
            requests,
            groups,
            num_answer_tokens=num_answer_tokens,
            num_kv_blocks=engine.num_kv_blocks,
            config=config,
            roofline=ROOFLINE,
        )
    )


def run_both(engine: Engine, requests: list[Request]) -> tuple[list[Completion], list[StepRecord], list[SimulatedStep]]:
    """What the engine answers, its steps, and the steps that a simulation foretells for answers of 20 tokens."""
    groups = plan_prefix_groups([request.token_ids for request in requests])
    real: list[StepRecord] = []
    answers = list(engine.run_plan(requests, groups, on_step=real.append))
    return answers, real, simulate(requests, groups, engine, 20)


def without_time(records: list[StepRecord]) -> list[dict[str, float]]:
    return [{**dataclasses.asdict(record), "duration_ms": 0} for record in records]


@pytest.mark.parametrize("kind", ["generate", "score", "both"])
@pytest.mark.parametrize(
    ("num_blocks", "max_num_batched_tokens", "output_reserve"), [(400, 64, 1.0), (23, 32, 0.0), (60, 13, 0.5)]
)
def test_a_simulated_run_has_the_steps_of_the_real_one(
    tiny_llama: Path, kind: str, num_blocks: int, max_num_batched_tokens: int, output_reserve: float
) -> None:
    block_bytes = 4 * 2 * 2 * 2 * 16 * 4  # of tokens, key and value, layers, KV heads, head dim, float32
    config = EngineConfig(
        dtype="float32",
        device="cpu",
        block_size=4,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_memory_bytes=num_blocks * block_bytes,
        output_reserve=output_reserve,
    )
    engine = Engine.load(tiny_llama, config)
    assert engine.num_kv_blocks == num_blocks
    requests = [
        Request(request_id=str(i), token_ids=prompt, mode="score", labels=LABELS)
        if kind == "score" or (kind == "both" and i % 2)
        else Request(request_id=str(i), token_ids=prompt, max_new_tokens=20, ignore_eos=True)
        for i, prompt in enumerate(make_prompts(40))
    ]
    answers, real, steps = run_both(engine, requests)

    assert without_time([step.record for step in steps]) == without_time(real)
    num_errors = sum(answer.error is not None for answer in answers)
    assert num_errors == len(find_oversized(requests, 4, num_blocks))
    summary = summarize_steps(steps)
    assert summary.num_finished_requests == len(requests) - num_errors
    assert summary.peak_kv_blocks == max(record.num_kv_blocks_used for record in real)
    assert summary.num_preempted_requests == sum(record.num_preempted_requests for record in real)
    if kind != "score":
        assert (num_errors > 0) == (num_blocks == 23)
        assert (summary.num_preempted_requests > 0) == (output_reserve < 1.0)


@pytest.mark.parametrize(
    "policies",
    [
        {"sharing": "lru", "order": "fcfs", "max_running_requests": 6},
        {"sharing": "none", "batching": "static", "prefill": "whole", "packing": "padded"},
        {"sharing": "group", "order": "sjf", "preemption": "swap"},
        {"order": "priority", "batching": "dynamic", "preemption": "kill"},
        {"prefill": "whole", "packing": "prepacked", "preemption": "kill"},
    ],
    ids=lambda policies: " ".join(map(str, policies.values())),
)
def test_policies_are_simulated_as_they_run(tiny_llama: Path, policies: dict[str, Any]) -> None:
    config = EngineConfig(
        dtype="float32",
        device="cpu",
        block_size=4,
        max_num_batched_tokens=90,
        kv_memory_bytes=60 * 4 * 2 * 2 * 2 * 16 * 4,
        output_reserve=0.0,
        **policies,
    )
    engine = Engine.load(tiny_llama, config)
    requests = [
        Request(request_id=str(i), token_ids=prompt, max_new_tokens=20, ignore_eos=True, priority=i % 4)
        for i, prompt in enumerate(make_prompts(24))
    ]
    answers, real, steps = run_both(engine, requests)
    assert without_time([step.record for step in steps]) == without_time(real)
    assert sum(record.num_preempted_requests for record in real) > 0
    assert any(answer.error is not None for answer in answers) == (config.preemption == "kill")


def test_a_deterministic_run_is_simulated_with_its_shorter_prefixes(tiny_llama: Path) -> None:
    config = EngineConfig(dtype="float32", device="cpu", deterministic=True, block_size=32, kv_memory_bytes=1 << 22)
    engine = Engine.load(tiny_llama, config)
    prompts = [[*range(3, 43), 50 + index] for index in range(3)]
    _, real, steps = run_both(engine, [Request(request_id=str(i), token_ids=p) for i, p in enumerate(prompts)])
    assert real[0].num_prefix_tokens == 32
    assert [step.record.num_prefix_tokens for step in steps][:1] == [32]
    assert [step.record.num_suffix_tokens for step in steps][:1] == [real[0].num_suffix_tokens]


def test_padding_is_work() -> None:
    """Three prompts of a step, padded to the longest, cost what three of that length cost."""
    config = EngineConfig(prefill="whole", packing="padded")

    def costs(lengths: tuple[int, ...]) -> list[float]:
        requests = [Request(request_id=str(n), token_ids=[n] * n, max_new_tokens=1) for n in lengths]
        groups = plan_prefix_groups([request.token_ids for request in requests])
        steps = simulate_plan(
            requests, groups, num_answer_tokens=1, num_kv_blocks=100, config=config, roofline=ROOFLINE
        )
        return [step.cost.compute_s for step in steps]

    assert len(costs((5, 9, 30))) == 1
    assert costs((5, 9, 30)) == pytest.approx(costs((28, 29, 30)), rel=0)


def test_answers_end_at_the_expected_length(tiny_llama: Path) -> None:
    config = EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 22)
    requests = [
        Request(request_id=str(i), token_ids=p, max_new_tokens=3 + i % 9) for i, p in enumerate(make_prompts(9))
    ]
    engine = Engine.load(tiny_llama, config)
    groups = plan_prefix_groups([request.token_ids for request in requests])
    for expected in (1, 6, 50):
        summary = summarize_steps(simulate(requests, groups, engine, expected))
        lengths = {(tuple(r.token_ids.tolist()), r.max_new_tokens): min(expected, r.max_new_tokens) for r in requests}
        # An answer's first token comes with its prompt, so it is one token longer than its decode rows.
        assert summary.num_decode_tokens == sum(length - 1 for length in lengths.values())


def test_a_step_costs_what_the_roofline_says() -> None:
    matrices = 2 * (8 * 4 * 2 * 2 + 8 * 2 * 2 * 2 + 3 * 8 * 10)
    assert (SHAPE.num_layer_weights, SHAPE.num_head_weights) == (matrices, 800)
    assert (SHAPE.weight_bytes, SHAPE.kv_bytes_per_token) == (2 * (matrices + 800), 2 * 2 * 2 * 2 * 2)
    work = StepWork(num_rows=7, num_output_rows=3, num_attention_pairs=50, num_kv_tokens_read=20)
    device = DEVICES["a100"]
    cost = Roofline(SHAPE, device, "float32").cost(work)
    assert cost.compute_s == pytest.approx((2 * 7 * matrices + 2 * 3 * 800 + 50 * 4 * 2 * 4 * 2) / (0.63 * 19.5e12))
    assert cost.memory_s == pytest.approx((2 * (matrices + 800) + 27 * 32) / (0.75 * 2039e9))
    assert cost.seconds == cost.host_s == 2 * device.host_s_per_layer
    for much, bound in (("num_attention_pairs", "compute_s"), ("num_kv_tokens_read", "memory_s")):
        longer = ROOFLINE.cost(dataclasses.replace(work, **{much: 10**12}))
        assert longer.seconds == getattr(longer, bound)
    with pytest.raises(ConfigError, match="no rate for dtype 'int8'"):
        Roofline(SHAPE, device, "int8")


def test_attention_is_counted_causally_and_a_shared_prefix_read_once() -> None:
    prefix, own = list(range(1, 33)), ([50, 51, 52], [60])
    requests = [Request(request_id=str(i), token_ids=prefix + tail, max_new_tokens=2) for i, tail in enumerate(own)]

    class Recorder(Roofline):
        def cost(self, work: StepWork):  # type: ignore[no-untyped-def]
            seen.append(work)
            return super().cost(work)

    seen: list[StepWork] = []
    recorder = Recorder(SHAPE, DEVICES["h200"], "bfloat16")
    steps = list(
        simulate_plan(
            requests,
            plan_prefix_groups([r.token_ids for r in requests]),
            num_answer_tokens=2,
            num_kv_blocks=100,
            config=EngineConfig(block_size=16, max_num_batched_tokens=32),
            roofline=recorder,
        )
    )
    assert [step.record.num_tokens for step in steps] == [32, 4, 2]
    assert seen == [
        StepWork(num_rows=32, num_output_rows=0, num_attention_pairs=32 * 33 // 2, num_kv_tokens_read=32),
        StepWork(num_rows=4, num_output_rows=2, num_attention_pairs=33 + 34 + 35 + 33, num_kv_tokens_read=32 + 4),
        StepWork(num_rows=2, num_output_rows=2, num_attention_pairs=36 + 34, num_kv_tokens_read=32 + 6),
    ]
    assert [step.is_busy for step in steps] == [True, False, False]
    summary = summarize_steps(steps)
    assert summary.num_cool_down_steps == 2
    assert summary.cool_down_seconds == pytest.approx(steps[1].cost.seconds + steps[2].cost.seconds)
    assert (summary + summary).num_cool_down_steps == 4, "each of two plans has a cool-down"
    assert not any(step.is_held_back for step in steps)


def test_answers_are_as_long_as_their_requests_expect() -> None:
    """Two tokens, five, and the most of a request that expects nothing; the first token is no decode step."""
    requests = [
        Request(request_id=str(n), token_ids=[n + 1] * 9, max_new_tokens=most, expected_output_tokens=expected)
        for n, (most, expected) in enumerate([(30, 2), (30, 5), (3, None)])
    ]
    steps = simulate_plan(
        requests,
        plan_prefix_groups([request.token_ids for request in requests]),
        num_kv_blocks=100,
        config=EngineConfig(),
        roofline=ROOFLINE,
    )
    assert [step.record.num_decode_tokens for step in steps] == [0, 3, 2, 1, 1]


def test_a_run_short_of_memory_is_bound_by_it() -> None:
    requests = [Request(request_id=str(i), token_ids=[i + 1] * 30, max_new_tokens=30) for i in range(50)]
    groups = plan_prefix_groups([request.token_ids for request in requests])

    def bound(num_kv_blocks: int) -> tuple[str, float]:
        steps = simulate_plan(
            requests,
            groups,
            num_answer_tokens=30,
            num_kv_blocks=num_kv_blocks,
            config=EngineConfig(block_size=16, max_num_batched_tokens=512),
            roofline=ROOFLINE,
        )
        summary = summarize_steps(steps)
        assert summary.seconds == pytest.approx(sum(summary.seconds_by_resource.values()))
        return summary.bound, summary.seconds

    assert bound(20)[0] == "KV capacity"
    assert bound(2000)[0] == "host"
    assert bound(2000)[1] < bound(20)[1]


def test_a_model_s_shape_is_read_from_its_config(tiny_llama: Path) -> None:
    config = json.loads((tiny_llama / "config.json").read_text())
    shape = ModelShape.from_config(config, dtype="float32")
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.has_tied_embeddings) == (2, 2, 16, True)
    engine = Engine.load(tiny_llama, EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 20))
    assert shape.kv_bytes_per_token == engine._model.kv_shape.bytes_per_token
    assert shape.weight_bytes == pytest.approx((tiny_llama / "model.safetensors").stat().st_size, rel=0.02)
    del config["intermediate_size"]
    with pytest.raises(ModelError, match="intermediate_size must be a positive whole number, got None"):
        ModelShape.from_config(config, dtype="float32")


def test_experts_are_counted_by_who_reads_them() -> None:
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=200, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    shape = ModelShape.from_config(config.to_dict(), dtype="float32")
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    assert shape.weight_bytes == pytest.approx(4 * num_weights, rel=0.02)
    of_an_expert = 2 * 3 * 64 * 96
    assert shape.num_read_weights(1) == shape.num_layer_weights
    rng = np.random.default_rng(1)
    reached = [len({expert for _ in range(3) for expert in rng.choice(8, 2, replace=False)}) for _ in range(4000)]
    read = (shape.num_read_weights(3) - shape.num_layer_weights) / of_an_expert
    assert read == pytest.approx(np.mean(reached) - 2, rel=0.02)
    assert shape.num_read_weights(1000) - shape.num_layer_weights == 6 * of_an_expert


def test_the_shape_of_a_tree_with_two_levels() -> None:
    # An instruction of 20 tokens; below it two documents of 10, with three and five questions.
    documents = [[1] * 20 + [d] * 10 for d in (2, 3)]
    prompts = [documents[0] + [10 + i, 7] for i in range(3)] + [documents[1] + [20 + i, 7] for i in range(5)]
    arrays = [np.array(prompt, dtype=np.int32) for prompt in prompts]
    shape = measure_shape(build_prefix_tree(arrays), plan_prefix_groups(prompts))
    assert shape.num_tree_nodes == 3
    assert shape.levels == Quantiles(low=2, median=2, high=2, largest=2)
    assert (shape.num_groups, shape.num_sharing_groups) == (2, 2)
    assert shape.share_degree == Quantiles(low=3, median=3, high=5, largest=5)
    assert shape.prefix_tokens == Quantiles(low=30, median=30, high=30, largest=30)
    alone = plan_prefix_groups([[1, 2], [3, 4]])
    assert measure_shape(build_prefix_tree([]), alone).share_degree == Quantiles(low=0, median=0, high=0, largest=0)


def test_devices_are_found_by_their_product_name_and_measured_otherwise() -> None:
    gib = 1024**3
    assert match_device("NVIDIA A100-SXM4-80GB", 79 * gib) is DEVICES["a100"]
    assert match_device("NVIDIA H200", 139 * gib) is DEVICES["h200"]
    assert match_device("AMD Instinct MI300X OAM", 192 * gib) is DEVICES["mi300x"]
    assert match_device("AMD Instinct MI250X / MI250", 64 * gib) is DEVICES["mi250"]
    assert match_device("NVIDIA GeForce RTX 4090", 24 * gib) is None
    cpu = probe_device(torch.device("cpu"), SHAPE, "float32")
    assert 1e6 < cpu.flops_per_second("float32") < 1e14  # a loaded machine may be slow
    assert 1e8 < cpu.bytes_per_second < 1e13
    costs = Roofline(SHAPE, cpu, "float32").cost(
        StepWork(num_rows=1, num_output_rows=1, num_attention_pairs=1, num_kv_tokens_read=1)
    )
    assert costs.seconds == pytest.approx(max(costs.compute_s, costs.memory_s) + 2 * cpu.host_s_per_layer)
    again = probe_device(torch.device("cpu"), SHAPE, "float32")
    assert (again.name, again.peak_flops) == ("cpu", cpu.peak_flops), "a rate is measured once in a process"
    assert again.peak_bytes_per_second == cpu.peak_bytes_per_second
    for dtype in ("bfloat16", "int8"):  # torch's products may be slow where the engine's own are not
        other = probe_device(torch.device("cpu"), SHAPE, dtype)
        assert other.flops_per_second(dtype) >= cpu.flops_per_second("float32")


SMOLLM2 = ModelShape(
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_q_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    has_tied_embeddings=True,
    value_bytes=2,
)


@pytest.mark.parametrize(
    ("num_prompts", "prompt_tokens", "answer_tokens", "seconds"),
    [(6, 430, 1, 0.672), (32, 60, 24, 1.257), (2, 60, 48, 1.315)],
)
def test_a_cpu_takes_what_its_measured_rates_say(
    monkeypatch: pytest.MonkeyPatch, num_prompts: int, prompt_tokens: int, answer_tokens: int, seconds: float
) -> None:
    """Rates of one core of a Xeon with AMX, and the processor time that the engine took there in bfloat16."""
    monkeypatch.setattr("engine.simulation.device_probe._measure_flops", lambda *_: 1179e9)
    monkeypatch.setattr("engine.simulation.device_probe._measure_bandwidth", lambda *_: 15.0e9)
    cpu = probe_device(torch.device("cpu"), SMOLLM2, "bfloat16")
    requests = [
        Request(request_id=str(number), token_ids=[number + 1] * prompt_tokens, max_new_tokens=answer_tokens)
        for number in range(num_prompts)
    ]
    steps = simulate_plan(
        requests,
        plan_prefix_groups([request.token_ids for request in requests]),
        num_answer_tokens=answer_tokens,
        num_kv_blocks=1000,
        config=EngineConfig(),
        roofline=Roofline(SMOLLM2, cpu, "bfloat16"),
    )
    assert summarize_steps(steps).seconds == pytest.approx(seconds, rel=0.25)


def test_a_device_that_only_has_the_name_is_not_in_the_table() -> None:
    gib = 1024**3
    assert match_device("NVIDIA A100-SXM4-40GB", 40 * gib) is None
    assert match_device("NVIDIA H100 PCIe", 80 * gib) is None
    assert match_device("NVIDIA GH200 480GB", 96 * gib) is None
    assert match_device("NVIDIA RTX A1000", 6 * gib) is None


def test_a_kv_budget_is_a_share_of_what_the_weights_leave() -> None:
    def kv_bytes(memory_bytes: int, name: str = "a100") -> int:
        device = replace(DEVICES["a100"], name=name, memory_bytes=memory_bytes)
        return Hardware(device=device, dtype="float32", shape=SHAPE).kv_bytes(EngineConfig(memory_fraction=0.5))

    weight_bytes = SHAPE.weight_bytes
    assert kv_bytes(weight_bytes + 10**8) == 10**8 // 2
    assert kv_bytes(weight_bytes + 10**12) == 10**12 // 2
    assert kv_bytes(weight_bytes + 10**12, "cpu") == MOST_CPU_KV_BYTES
    with pytest.raises(CapacityError, match=r"a KV budget of 0\.00 GB does not fit"):
        kv_bytes(weight_bytes - 1)
