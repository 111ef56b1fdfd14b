"""The forecast for an H200, held to what batches took on one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.first_light.batches import KV_TOKENS, SHORT
from benchmarks.measuring.batch import Batch
from benchmarks.measuring.workloads import Sizes, make_batches
from benchmarks.random_model import SHAPES, model_config
from engine.config import EngineConfig
from engine.model.model_shape import ModelShape
from engine.planning.prefix_groups import plan_prefix_groups
from engine.request import Request
from engine.simulation.device import DEVICES, Roofline
from engine.simulation.simulation import simulate_plan

RESULTS = Path(__file__).parents[2] / "benchmarks/results/first_light_h200/batches.json"
SIZES = Sizes(scale=1.0, num_tokens=160_000, kv_tokens=0, vocab_size=128_256)
CONFIG = EngineConfig(device="cpu", block_size=16, max_num_batched_tokens=8192)


def predicted_seconds(batch: Batch) -> float:
    shape = ModelShape.from_config(model_config(SHAPES["llama-3-8b"]), dtype="bfloat16")
    work = batch.work("shuffled", round_number=2)
    requests = [
        Request(request_id=str(index), token_ids=token_ids, max_new_tokens=work.num_output_tokens, ignore_eos=True)
        for index, token_ids in enumerate(work.token_ids)
    ]
    steps = simulate_plan(
        requests,
        plan_prefix_groups(work.token_ids, block_size=CONFIG.block_size),
        num_answer_tokens=work.num_output_tokens,
        num_kv_blocks=KV_TOKENS // CONFIG.block_size,
        config=CONFIG,
        roofline=Roofline(shape, DEVICES["h200"], "bfloat16"),
    )
    return sum(step.cost.seconds for step in steps)


@pytest.mark.parametrize("name", ["prefill", *SHORT])
def test_the_forecast_is_close_to_what_an_h200_took(name: str) -> None:
    case, num_groups = SHORT.get(name, ("control", None))
    (batch,) = make_batches([case], SIZES, tokenizer=Path("unused"), squad=None, ranking=None)
    if num_groups is None:
        batch = replace(batch, num_output_tokens=1)
    else:
        batch = batch.first(num_groups, len(batch.groups[0].own))
    measured = json.loads(RESULTS.read_text())["parts"][f"ours: {name}"]["found"]["median_seconds"]
    assert predicted_seconds(batch) == pytest.approx(measured, rel=0.06)
