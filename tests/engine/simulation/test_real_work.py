"""What a simulated step costs, against what a real one computes and reads: layers with windows, and experts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from engine import Engine, EngineConfig, Request, StepRecord, plan_prefix_groups
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.cpu.native import NativeBackend
from engine.kernels.scoring import Scoring
from engine.model.model import Model
from engine.model.model_shape import ModelShape
from engine.model.proof.tiny_model import make_tiny_model
from engine.simulation.device import DEVICES, Roofline, StepWork
from engine.simulation.simulation import simulate_plan

SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
MODELS: dict[str, transformers.PretrainedConfig] = {
    "mistral": transformers.MistralConfig(**SIZES, num_hidden_layers=2, sliding_window=40),
    "gemma2": transformers.Gemma2Config(**SIZES, num_hidden_layers=4, sliding_window=24),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, num_hidden_layers=7, sliding_window=50, sliding_window_pattern=3),
    "gpt_oss": transformers.GptOssConfig(
        **SIZES, num_hidden_layers=2, sliding_window=33, num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **SIZES, num_hidden_layers=3, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=64, mlp_only_layers=[1],
    ),
    "starcoder2": transformers.Starcoder2Config(**SIZES, num_hidden_layers=2, sliding_window=64),
}  # fmt: skip


class RealSteps:
    """Operations, KV bytes and experts' weights of an engine's steps, counted as they are computed."""

    def __init__(self, engine: Engine, shape: ModelShape) -> None:
        self._shape, self._backend = shape, engine._runner.attention
        self._batches: dict[int, AttentionBatch] = {}
        self._counted: dict[tuple[int, int], tuple[float, float]] = {}
        self._works: list[Any] = []
        self.flops: list[float] = []
        self.kv_bytes: list[float] = []
        self._flops = self._kv_bytes = 0.0

    @contextmanager
    def counting(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        prepare, attend = self._backend.prepare, self._backend.attend

        def prepare_noted(batch: AttentionBatch) -> Any:
            work = prepare(batch)
            self._batches[id(work)] = batch
            self._works.append(work)  # so that no id is used again within the step
            return work

        def attend_noted(query: Any, k_cache: Any, v_cache: Any, work: Any, scoring: Scoring) -> Any:
            flops, kv_bytes = self._count_attention(id(work), scoring.window)
            self._flops, self._kv_bytes = self._flops + flops, self._kv_bytes + kv_bytes
            return attend(query, k_cache, v_cache, work, scoring)

        monkeypatch.setattr(self._backend, "prepare", prepare_noted)
        monkeypatch.setattr(self._backend, "attend", attend_noted)
        with FlopCounterMode(display=False) as self._counter:
            yield

    def end_step(self, record: StepRecord) -> None:
        total = self._counter.get_total_flops() + self._flops
        self.flops.append(total - sum(self.flops))
        self.kv_bytes.append(self._kv_bytes)
        self._kv_bytes = 0.0
        for noted in (self._batches, self._counted, self._works):
            noted.clear()

    def _count_attention(self, work: int, window: int) -> tuple[float, float]:
        """Operations and KV bytes of one layer, token by token, from who attends to what."""
        if (work, window) in self._counted:
            return self._counted[work, window]
        batch, shape, flops, kv_bytes = self._batches[work], self._shape, 0, 0
        for group in range(batch.num_groups):
            prefix = int(batch.prefix_lens[group])
            read = np.zeros(prefix, dtype=bool)
            for sequence in range(*batch.group_starts[group : group + 2]):
                num_rows = int(batch.cu_seqlens_q[sequence + 1] - batch.cu_seqlens_q[sequence])
                end = prefix + int(batch.suffix_lens[sequence])
                seen = np.zeros(end, dtype=bool)
                for position in range(end - num_rows, end):
                    first = max(0, position - window + 1) if window else 0
                    flops += 4 * shape.num_q_heads * shape.head_dim * (position + 1 - first)
                    seen[first : position + 1] = True
                read |= seen[:prefix]
                kv_bytes += int(seen[prefix:].sum() + num_rows) * shape.kv_bytes_per_layer
            kv_bytes += int(read.sum()) * shape.kv_bytes_per_layer
        self._counted[work, window] = flops, kv_bytes
        return flops, kv_bytes


class Recorder(Roofline):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape, DEVICES["h200"], "float32")
        self.works: list[StepWork] = []

    def cost(self, work: StepWork) -> Any:
        self.works.append(work)
        return super().cost(work)


def make_requests() -> list[Request]:
    """Prompts below two documents below an instruction, all longer than the windows."""
    rng = np.random.default_rng(5)
    instruction = rng.integers(3, 160, 40)
    documents = [np.concatenate([instruction, rng.integers(3, 160, length)]) for length in (70, 33)]
    return [
        Request(
            request_id=str(i),
            token_ids=np.concatenate([documents[i % 2], rng.integers(3, 160, 1 + 9 * i)]),
            max_new_tokens=6,
            ignore_eos=True,
        )
        for i in range(6)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_a_simulated_run_costs_what_the_real_one_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_config = MODELS[name]
    shape = ModelShape.from_config(hf_config.to_dict(), dtype="float32")
    config = EngineConfig(
        dtype="float32", device="cpu", attention="native", kv_memory_bytes=1 << 22, max_num_batched_tokens=64
    )
    tiny = make_tiny_model(hf_config)
    assert shape.weight_bytes == pytest.approx(sum(p.nbytes for p in tiny.parameters()), rel=0.03)
    monkeypatch.setattr(NativeBackend, "pack", lambda kernels, weight, bias=None: None)  # so that products are torch's
    experts = [module for module in tiny.modules() if type(module).__name__.endswith("Experts")]
    for module in experts:
        module.config._experts_implementation = "eager"  # products that the counter sees
    engine = Engine(Model(tiny, device=torch.device("cpu"), owns_weights=False), config)
    requests = make_requests()
    groups = plan_prefix_groups([request.token_ids for request in requests])
    real, records = RealSteps(engine, shape), list[StepRecord]()

    def note(record: StepRecord) -> None:
        real.end_step(record)
        records.append(record)

    with real.counting(monkeypatch):
        answers = list(engine.run_plan(requests, groups, on_step=note))
    assert all(answer.num_output_tokens == 6 for answer in answers)

    recorder, layout = Recorder(shape), shape.kv_layout(config)
    assert layout == engine._cache.layout
    assert engine.num_kv_blocks == config.kv_memory_bytes // shape.kv_block_bytes(config)  # type: ignore[operator]
    steps = simulate_plan(
        requests, groups, num_answer_tokens=6, num_kv_blocks=engine.num_kv_blocks, config=config, roofline=recorder,
        windows=layout.windows,
    )  # fmt: skip
    assert [asdict(step.record) | {"duration_ms": 0} for step in steps] == [
        asdict(record) | {"duration_ms": 0} for record in records
    ]
    flops = [recorder.count_flops(work) for work in recorder.works]
    assert flops == pytest.approx(real.flops, rel=0.02)
    weights = [recorder.count_bytes(work) for work in recorder.works]
    kv = [(work.num_kv_tokens_read + work.num_rows) * shape.kv_bytes_per_token for work in recorder.works]
    assert kv == pytest.approx(real.kv_bytes, rel=0.02)
    assert all(whole > of_kv for whole, of_kv in zip(weights, kv, strict=True))
