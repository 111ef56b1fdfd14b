"""Encoders against sentence-transformers in float32: the same embeddings and scores, however texts are packed."""

import json
import random
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
import transformers

from engine import EngineConfig, Request, StepRecord, plan_prefix_groups
from engine.encoding.encoder_engine import EncoderEngine
from engine.encoding.families import ENCODERS
from engine.encoding.packed_linear import PackedLinear
from engine.errors import ConfigError, ModelError, RequestError
from tests.tiny_encoders import HIDDEN_SIZE, MAX_TOKENS, save_encoder, save_modules

WORDS = ["night", "watchman", "walks", "around", "the", "house", "and", "writes", "down", "what", "he", "has", "seen;"]
TOLERANCE = 2e-5


def load(folder: Path, **settings: int) -> EncoderEngine:
    return EncoderEngine.load(folder, EngineConfig(dtype="float32", device="cpu", **settings))


def texts(count: int = 20) -> list[str]:
    """Of uneven lengths, with two that are equal and one that begins another."""
    rng = random.Random(3)
    made = [" ".join(rng.choices(WORDS, k=rng.randrange(1, 18))) for _ in range(count)]
    return [*made, made[0], made[1] + " and more", "x"]


def encode(folder: Path, *texts_of: list[str]) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encoded: list[list[int]] = tokenizer(*texts_of, truncation=True)["input_ids"]
    return encoded


def embed(engine: EncoderEngine, prompts: list[list[int]], **settings: object) -> np.ndarray:
    requests = [Request(request_id=str(i), token_ids=p, mode="embed", **settings) for i, p in enumerate(prompts)]
    return np.stack([completion.embedding for completion in engine.pool(requests)])


def by_sentence_transformers(folder: Path, given: list[str], **settings: object) -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": "float32"})
    return model.encode(given, batch_size=7, show_progress_bar=False, **settings)


@pytest.mark.parametrize("family", ENCODERS)
def test_families_match_sentence_transformers(family: str, tmp_path: Path) -> None:
    folder = save_modules(save_encoder(family, tmp_path / family), "pooling_mode_mean_tokens")
    expected = by_sentence_transformers(folder, texts())
    for max_num_batched_tokens in (17, 4096):
        found = embed(load(folder, max_num_batched_tokens=max_num_batched_tokens), encode(folder, texts()))
        assert np.abs(found - expected).max() < TOLERANCE, (family, max_num_batched_tokens)


@pytest.mark.parametrize(
    "pooling", ["cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
)
def test_poolings_match_sentence_transformers(pooling: str, tmp_path: Path) -> None:
    folder = save_modules(save_encoder("bert", tmp_path / "m"), f"pooling_mode_{pooling}", normalize=False, dense=16)
    expected = by_sentence_transformers(folder, texts())
    assert np.abs(embed(load(folder), encode(folder, texts()), normalize=False) - expected).max() < TOLERANCE


def test_positions_that_config_json_does_not_count_are_the_family_s_default(tmp_path: Path) -> None:
    folder = save_encoder("modernbert", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    del config["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder).max_model_len == transformers.ModernBertConfig().max_position_embeddings
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 0}))
    with pytest.raises(ModelError, match="max_position_embeddings must be a positive whole number, got 0"):
        load(folder)


def test_dimensions_are_cut_and_normalised_again(tmp_path: Path) -> None:
    folder = save_modules(save_encoder("roberta", tmp_path / "m"), "pooling_mode_cls_token")
    expected = by_sentence_transformers(folder, texts(), truncate_dim=12, normalize_embeddings=True)
    found = embed(load(folder), encode(folder, texts()), dimensions=12)
    assert found.shape[1] == 12
    assert np.abs(found - expected).max() < TOLERANCE


def test_a_real_model_matches_sentence_transformers(minilm: Path) -> None:
    """all-MiniLM-L6-v2 on Python's reference, long texts cut as its files say."""
    given = [topics[name] for name in ("assert", "break", "class", "del", "with", "typesmapping")]
    prompts = [prompt[:255] + prompt[-1:] if len(prompt) > 256 else prompt for prompt in encode(minilm, given)]
    assert max(map(len, prompts)) == 256
    assert np.abs(embed(load(minilm), prompts) - by_sentence_transformers(minilm, given)).max() < 2e-6


def test_without_modules_the_mean_is_taken(tmp_path: Path) -> None:
    folder = save_encoder("xlm-roberta", tmp_path / "m")
    expected = by_sentence_transformers(folder, texts())
    assert np.abs(embed(load(folder), encode(folder, texts()), normalize=False) - expected).max() < TOLERANCE


@pytest.mark.parametrize(("family", "num_classes"), [(family, 1 + i % 3) for i, family in enumerate(ENCODERS)])
def test_heads_match_transformers(family: str, num_classes: int, tmp_path: Path) -> None:
    folder = save_encoder(family, tmp_path / "m", num_classes=num_classes)
    first, second = texts(12), list(reversed(texts(12)))
    prompts = encode(folder, first, second)
    requests = [
        Request(request_id=str(i), token_ids=prompt, mode="classify", pair_separator=2)
        for i, prompt in enumerate(prompts)
    ]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for completion, *pair in zip(load(folder).pool(requests, "classify"), first, second, strict=True):
        inputs = tokenizer(*pair, truncation=True, return_tensors="pt")
        if getattr(model.config, "type_vocab_size", 0) < 2:
            inputs.pop("token_type_ids")
        with torch.inference_mode():
            logits = model(**inputs).logits[0].double()
        expected = logits.log_softmax(0) if num_classes > 1 else torch.nn.functional.logsigmoid(logits)
        assert np.abs(np.array(completion.label_logprobs) - expected.numpy()).max() < TOLERANCE * 10
        assert completion.finish_reason == "scored"


def test_a_head_has_as_many_outputs_as_config_json_names_classes(tmp_path: Path) -> None:
    """By `num_labels` where it names none; files of most rerankers have one output."""
    folder = save_encoder("bert", tmp_path / "m", num_classes=1)
    config = json.loads((folder / "config.json").read_text())
    config = {name: values for name, values in config.items() if name not in ("id2label", "label2id")}
    (folder / "config.json").write_text(json.dumps(config | {"num_labels": 1}))
    requests = [Request(request_id=0, token_ids=[5, 9], mode="classify")]
    (answer,) = load(folder).pool(requests, "classify")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = torch.nn.functional.logsigmoid(model(torch.tensor([[5, 9]])).logits.double())
    assert answer.label_logprobs == pytest.approx([float(expected)], abs=TOLERANCE * 10)


def test_equal_texts_are_computed_once_and_steps_are_full(tmp_path: Path) -> None:
    folder = save_encoder("bert", tmp_path / "m")
    prompts = [list(range(10, 10 + length)) for length in (5, 30, 30, 12, 60, 5)]
    requests = [Request(request_id=str(i), token_ids=p, mode="embed") for i, p in enumerate(prompts)]
    steps: list[StepRecord] = []
    engine = load(folder, max_num_batched_tokens=64)
    answers = {a.request_id: a for a in engine.run_plan(requests, plan_prefix_groups(prompts), on_step=steps.append)}
    assert [step.num_tokens for step in steps] == [60, 30 + 12 + 5]
    assert [step.num_waiting_requests for step in steps] == [5, 0]
    assert sorted(answers[i].num_cached_tokens for i in "12") == [0, 30]
    assert np.array_equal(answers["1"].embedding, answers["2"].embedding)
    assert sum(answer.compute_ms for answer in answers.values()) == pytest.approx(sum(s.duration_ms for s in steps))


def test_a_run_that_its_callback_ends_has_given_the_texts_of_its_steps(tmp_path: Path) -> None:
    prompts = [[10] * 60, [11] * 30, [12] * 30]
    requests = [Request(request_id=str(i), token_ids=p, mode="embed") for i, p in enumerate(prompts)]
    engine, found = load(save_encoder("bert", tmp_path / "m"), max_num_batched_tokens=64), []

    def end(step: StepRecord) -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        found += engine.run_plan(requests, plan_prefix_groups(prompts), on_step=end)
    assert [answer.request_id for answer in found] == ["0"]


def test_products_are_packed_and_an_exact_gelu_is_part_of_them(tmp_path: Path) -> None:
    for activation, has_gelu in (("gelu", True), ("gelu_new", False), ("relu", False)):
        folder = save_encoder("bert", tmp_path / activation, hidden_act=activation)
        packed = load(folder)._encoder._base
        layer, expected = packed.encoder.layer[0], transformers.AutoModel.from_pretrained(folder).encoder.layer[0]
        assert isinstance(layer.intermediate.dense, PackedLinear)
        assert isinstance(layer.intermediate.intermediate_act_fn, torch.nn.Identity) == has_gelu
        states = torch.randn(1, 9, HIDDEN_SIZE)
        with torch.inference_mode():
            assert (layer.intermediate(states) - expected.intermediate(states)).abs().max() < 1e-5


def test_impossible_requests(tmp_path: Path) -> None:
    engine = load(save_encoder("bert", tmp_path / "m"))
    for request, reason in (
        (Request(request_id="a", token_ids=[1] * (MAX_TOKENS + 1), mode="embed"), "exceeds the context"),
        (Request(request_id="a", token_ids=[512], mode="embed"), "not below the vocabulary"),
        (Request(request_id="a", token_ids=[5]), "expected 'embed'"),
    ):
        with pytest.raises(RequestError, match=reason):
            engine.pool([request])
    groups = plan_prefix_groups([[512], [6]])
    requests = [Request(request_id=name, token_ids=ids, mode="embed") for name, ids in (("a", [512]), ("b", [6]))]
    found = {answer.request_id: answer.finish_reason for answer in engine.run_plan(requests, groups)}
    assert found == {"a": "error", "b": "embedded"}
    with pytest.raises(RequestError, match="request 'b' is in no group"):
        list(engine.run_plan(requests, [group for group in groups if group.members[0].request_indices == (0,)]))
    with pytest.raises(ModelError, match="mode is 'generate'"):
        list(engine.run_plan([Request(request_id="a", token_ids=[5])], groups[:1]))
    with pytest.raises(ModelError, match="no classification head"):
        engine.pool([Request(request_id="a", token_ids=[5], mode="classify")], "classify")


def test_an_attention_that_is_not_computed_is_refused(tmp_path: Path) -> None:
    folder = save_encoder("bert", tmp_path / "m")
    engine = load(folder)
    with pytest.raises(ModelError, match="softcap"):
        engine._encoder._base(torch.tensor([[5, 6]]), text_runs=None, softcap=3.0)
    transformers.GPT2Config().save_pretrained(folder)
    with pytest.raises(ModelError, match="gpt2"):
        load(folder)


def test_an_encoder_that_computes_nan_gives_no_answers(tmp_path: Path) -> None:
    folder = save_encoder("bert", tmp_path / "m", num_classes=3)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    model.base_model.encoder.layer[0].output.dense.weight.data *= 1e38
    model.save_pretrained(folder)
    engine = load(folder)
    for mode in ("embed", "classify"):
        with pytest.raises(FloatingPointError, match="the model computed NaN"):
            engine.pool([Request(request_id="a", token_ids=[5, 6, 7], mode=mode)], mode)


def test_arguments_of_other_types_are_named(tmp_path: Path) -> None:
    folder = save_encoder("bert", tmp_path / "m")
    engine, request = load(folder), Request(request_id="a", token_ids=[5], mode="embed")
    with pytest.raises(ConfigError, match="on_step must be a function of step records, got 5"):
        list(engine.run_plan([request], plan_prefix_groups([[5]]), on_step=5))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"adapter must be an Adapter, as Adapter\.find\(folder\) makes, got 'lora'"):
        EncoderEngine.load(folder, adapter="lora")  # type: ignore[arg-type]
    for dtype in ("fp8", "int8"):
        with pytest.raises(ConfigError, match=f"dtype '{dtype}' is for decoders, this is an encoder"):
            EncoderEngine.load(folder, EngineConfig(dtype=dtype))
    with pytest.raises(ModelError, match="model must be the path of a checkpoint folder or a hub id, got None"):
        EncoderEngine.load(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="config must be an EngineConfig, got 'cpu'"):
        EncoderEngine.load(tmp_path, "cpu")  # type: ignore[arg-type]


def test_more_dimensions_than_there_are_are_refused(tmp_path: Path) -> None:
    engine = EncoderEngine.load(save_encoder("bert", tmp_path / "bert"), EngineConfig(dtype="float32", device="cpu"))
    request = Request(request_id="a", token_ids=[5], mode="embed", dimensions=1000)
    with pytest.raises(RequestError, match="request 'a': dimensions is 1000, the model's embeddings have 48"):
        engine.pool([request])
