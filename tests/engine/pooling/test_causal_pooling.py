"""Causal models' embeddings and class scores, in float32, against sentence-transformers and transformers."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from engine import Engine, EngineConfig, Request, plan_prefix_groups
from engine.errors import ModelError, RequestError
from tests.tiny_encoders import save_modules

TOLERANCE = 2e-5
SCHEDULES = {
    "ample": {},
    "chunks": {"max_num_batched_tokens": 13},
    "no sharing": {"sharing": "none"},
    "a cache of blocks": {"sharing": "lru", "block_size": 4},
    "padded": {"prefill": "whole", "packing": "padded"},
    "little memory": {"kv_memory_bytes": 1 << 17, "preemption": "swap"},
}


def prompts() -> list[list[int]]:
    """An instruction in front of each, uneven lengths, a duplicate, a prompt that begins another."""
    rng = random.Random(5)
    instruction = [rng.randrange(3, 500) for _ in range(21)]
    made = [instruction + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 60))] for _ in range(12)]
    return [*made, made[0], [*made[1], 7], [9]]


def load(folder: Path, **settings: object) -> Engine:
    return Engine.load(
        folder, EngineConfig(**{"dtype": "float32", "device": "cpu", "kv_memory_bytes": 1 << 24, **settings})
    )


def embed(engine: Engine, **settings: object) -> np.ndarray:
    requests = [Request(request_id=str(i), token_ids=p, mode="embed", **settings) for i, p in enumerate(prompts())]
    return np.stack([completion.embedding for completion in engine.pool(requests)])


@pytest.fixture(scope="module")
def embedding_checkpoint(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 as its embedding models are saved: without the language model's prefix, pooled by the last token."""
    folder = tmp_path_factory.mktemp("causal") / "model"
    source = tiny_checkpoint("qwen3")
    shutil.copytree(source, folder)
    transformers.AutoModel.from_pretrained(source, dtype=torch.float32).save_pretrained(folder)
    return save_modules(folder, "pooling_mode_lasttoken")


@pytest.fixture(scope="module")
def stock_states(embedding_checkpoint: Path) -> np.ndarray:
    model = transformers.AutoModel.from_pretrained(embedding_checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        states = [model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in prompts()]
    return torch.stack(states).numpy()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_embeddings_are_the_last_hidden_states(
    embedding_checkpoint: Path, stock_states: np.ndarray, schedule: str
) -> None:
    found = embed(load(embedding_checkpoint, **SCHEDULES[schedule]), normalize=False)
    assert np.abs(found - stock_states).max() < TOLERANCE * np.abs(stock_states).max()


def test_embeddings_match_sentence_transformers(embedding_checkpoint: Path) -> None:
    from sentence_transformers import SentenceTransformer

    texts = ["Instruct: find it\nQuery: night", "Instruct: find it\nQuery: the house and the watchman", "x"]
    model = SentenceTransformer(str(embedding_checkpoint), device="cpu", model_kwargs={"dtype": "float32"})
    encoded = model.tokenizer(texts)["input_ids"]
    requests = [Request(request_id=str(i), token_ids=p, mode="embed") for i, p in enumerate(encoded)]
    found = np.stack([completion.embedding for completion in load(embedding_checkpoint).pool(requests)])
    assert np.abs(found - model.encode(texts)).max() < TOLERANCE
    assert np.allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-6)


def test_all_modes_of_one_run(embedding_checkpoint: Path, stock_states: np.ndarray) -> None:
    engine, given = load(embedding_checkpoint), prompts()
    requests = [
        Request(request_id=f"{mode}{i}", token_ids=prompt, **settings)
        for mode, settings in (
            ("embed", {"mode": "embed", "dimensions": 8}),
            ("score", {"mode": "score", "labels": ((5,), (6, 7))}),
            ("generate", {"max_new_tokens": 3}),
        )
        for i, prompt in enumerate(given)
    ]
    groups = plan_prefix_groups([request.token_ids for request in requests])
    together = {answer.request_id: answer for answer in engine.run_plan(requests, groups)}
    for i, state in enumerate(stock_states):
        cut = state[:8] / np.linalg.norm(state[:8])
        assert np.abs(together[f"embed{i}"].embedding - cut).max() < TOLERANCE
    alone = engine.score([request for request in requests if request.mode == "score"])
    for answer in alone:
        assert together[answer.request_id].label_logprobs == pytest.approx(answer.label_logprobs, abs=1e-5)
    for answer in engine.generate(requests[-len(given) :]):
        assert together[answer.request_id].token_ids == answer.token_ids
    assert {answer.finish_reason for answer in together.values()} >= {"embedded", "scored", "length"}


def test_more_dimensions_than_there_are_are_refused(embedding_checkpoint: Path, tiny_llama: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    for engine, num_values in ((load(embedding_checkpoint), 64), (load(model), 96)):
        asked = [
            Request(request_id="a", token_ids=[5], mode="embed", dimensions=n) for n in (num_values, num_values + 1)
        ]
        assert len(engine.pool(asked[:1])[0].embedding) == num_values
        reason = f"dimensions is {num_values + 1}, the model's embeddings have {num_values}"
        with pytest.raises(RequestError, match=f"request 'a': {reason}"):
            engine.pool(asked[1:])
        assert [answer.error for answer in engine.run_plan(asked[1:], plan_prefix_groups([[5]]))] == [reason]


@pytest.mark.parametrize("num_classes", [1, 3])
def test_a_classification_head(num_classes: int, tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source = tiny_checkpoint("qwen2")
    shutil.copytree(source, tmp_path / "model")
    torch.manual_seed(1)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        source, dtype=torch.float32, num_labels=num_classes, pad_token_id=0
    )
    model.save_pretrained(tmp_path / "model")
    requests = [Request(request_id=str(i), token_ids=p, mode="classify") for i, p in enumerate(prompts())]
    save_file({"score.weight": torch.zeros(1, model.config.hidden_size)}, tmp_path / "model" / "before.safetensors")
    engine = load(tmp_path / "model")
    with pytest.raises(RequestError, match="no output layer"):
        engine.generate([Request(request_id="a", token_ids=[5])])
    for completion, prompt in zip(engine.pool(requests, "classify"), prompts(), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0].double()
        expected = logits.log_softmax(0) if num_classes > 1 else torch.nn.functional.logsigmoid(logits)
        assert np.abs(np.array(completion.label_logprobs) - expected.numpy()).max() < 1e-4
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["id2label"] = {str(number): f"class {number}" for number in range(num_classes + 1)}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    why = rf"names {num_classes + 1} classes, the classification head has {num_classes} outputs"
    with pytest.raises(ModelError, match=rf"^model '.*model': config\.json {why}$"):
        load(tmp_path / "model").pool(requests, "classify")


def test_what_is_not_computed_is_refused(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama"), folder)
    request = Request(request_id="a", token_ids=[5], mode="classify")
    with pytest.raises(ModelError, match="no classification head"):
        load(folder).pool([request], "classify")
    save_modules(folder, "pooling_mode_mean_tokens")
    with pytest.raises(ModelError, match="pooling mean of a causal model"):
        load(folder).pool([Request(request_id="a", token_ids=[5], mode="embed")])


def test_int8_gives_the_same_bits_in_any_batch(
    tiny_checkpoint: Callable[[str], Path], embedding_checkpoint: Path, tmp_path: Path
) -> None:
    """Also behind a layer of the pooling: the order of torch's sums depends on the number of rows."""
    classes = tmp_path / "classes"
    shutil.copytree(tiny_checkpoint("qwen3"), classes)
    torch.manual_seed(1)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(classes, num_labels=5, pad_token_id=0)
    model.save_pretrained(classes)
    dense = tmp_path / "dense"
    shutil.copytree(embedding_checkpoint, dense)
    shutil.rmtree(dense / "1_Pooling")
    save_modules(dense, "pooling_mode_lasttoken", dense=40)

    def answer(engine: Engine, requests: list[Request]) -> list[list[float]]:
        return [
            [*(found.label_logprobs if found.embedding is None else found.embedding.tolist())]
            for found in engine.pool(requests, requests[0].mode)
        ]

    for folder, mode in ((classes, "classify"), (dense, "embed")):
        engine = load(folder, dtype="int8", block_size=32)
        requests = [Request(request_id=str(i), token_ids=p, mode=mode) for i, p in enumerate(prompts())]
        assert answer(engine, requests) == [answer(engine, [request])[0] for request in requests]
