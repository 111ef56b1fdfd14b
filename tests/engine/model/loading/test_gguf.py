"""GGUF files as programs write them: configuration, tokenizer and weights in one file."""

import re
import resource
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from engine import Engine, EngineConfig, Request
from engine.errors import ModelError
from engine.model.loading.checkpoint import read_end_tokens, read_json, resolve_checkpoint
from engine.model.loading.gguf import unpack_gguf
from tasks.prompts.text_codec import TextCodec

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, EXPERT_SIZE, TOKENS = 64, 4, 2, 32, 6, 96, 640


@cache
def read_tokenizer(file: Path) -> dict[str, tuple[list[GGUFValueType], Any]]:
    """The types and the values of each field of a file's tokenizer; SmolLM2's take seconds to read."""
    fields = GGUFReader(file).fields
    return {name: (field.types, field.contents()) for name, field in fields.items() if name.startswith("tokenizer.")}


def write_mixture(
    file: Path,
    tokenizer_of: Path,
    *,
    without: str = "",
    unread: str = "",
    num_parts: int = 1,
    changed: dict[str, Any] | None = None,
) -> None:
    """A Qwen3-MoE of two layers with random weights and a small part of another file's tokenizer.

    Args:
        without: name of a tensor that is left out.
        unread: name of a vector that no such model has.
        num_parts: of how many files this one says that it is the first.
        changed: fields of the tokenizer, None where the file has none.
    """
    writer = GGUFWriter(file, "qwen3moe")
    if num_parts > 1:
        writer.add_uint16("split.count", num_parts)
    fields = read_tokenizer(tokenizer_of)
    tokens = fields["tokenizer.ggml.tokens"][1][:TOKENS]
    for name, (types, values) in fields.items():
        kind = types[0]
        if name.endswith("merges"):
            known = set(tokens)
            values = [merge for merge in values if {*merge.split(), merge.replace(" ", "")} <= known]
        elif kind == GGUFValueType.ARRAY:
            values = values[:TOKENS]
        if (values := (changed or {}).get(name, values)) is None:
            continue
        writer.add_key_value(name, values, kind, sub_type=types[-1] if kind == GGUFValueType.ARRAY else None)
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(128)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)
    writer.add_vocab_size(TOKENS)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(EXPERT_SIZE)
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        weights = rng.normal(size=shape, scale=0.1 if len(shape) > 1 else 1).astype(np.float32)
        if name == without:
            return
        if len(shape) == 1 or "gate_inp" in name:
            writer.add_tensor(f"{name}.weight", weights)
            return
        rows = gguf.quantize(weights.reshape(-1, shape[-1]), GGMLQuantizationType.Q8_0)
        rows = rows.reshape(*shape[:-1], -1)
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=GGMLQuantizationType.Q8_0)

    add("token_embd", TOKENS, HIDDEN)
    add("output_norm", HIDDEN)
    add("output", TOKENS, HIDDEN)
    for layer in ("blk.0", "blk.1"):
        for norm, size in (("attn", HIDDEN), ("ffn", HIDDEN), ("attn_q", HEAD_DIM), ("attn_k", HEAD_DIM)):
            add(f"{layer}.{norm}_norm", size)
        add(f"{layer}.attn_q", HEADS * HEAD_DIM, HIDDEN)
        add(f"{layer}.attn_k", KV_HEADS * HEAD_DIM, HIDDEN)
        add(f"{layer}.attn_v", KV_HEADS * HEAD_DIM, HIDDEN)
        add(f"{layer}.attn_output", HIDDEN, HEADS * HEAD_DIM)
        add(f"{layer}.ffn_gate_inp", EXPERTS, HIDDEN)
        add(f"{layer}.ffn_gate_exps", EXPERTS, EXPERT_SIZE, HIDDEN)
        add(f"{layer}.ffn_up_exps", EXPERTS, EXPERT_SIZE, HIDDEN)
        add(f"{layer}.ffn_down_exps", EXPERTS, HIDDEN, EXPERT_SIZE)
    if unread:
        writer.add_tensor(unread, np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_experts_and_rotations_are_those_of_the_file(
    tmp_path: Path, smollm2_gguf: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Kept quantized or unpacked, with the same answers."""
    file = tmp_path / "mixture.gguf"
    write_mixture(file, smollm2_gguf)
    config = read_json(resolve_checkpoint(file) / "config.json")
    assert config["moe_intermediate_size"] == EXPERT_SIZE
    for folder in (resolve_checkpoint(file), unpack_gguf(resolve_checkpoint(file))):
        assert read_end_tokens(folder) == [0, 2], "<|endoftext|> and <|im_end|>"
    assert config["rope_parameters"] == {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    asked = [Request(request_id=str(n), token_ids=[20, 30, 40 + n] * 9, max_new_tokens=5) for n in range(3)]
    answers = []
    caplog.set_level("INFO", "batchloom.engine")
    for dtype in ("auto", "bfloat16"):
        engine = Engine.load(file, EngineConfig(dtype=dtype, device="cpu", kv_memory_bytes=1 << 22))
        answers.append([completion.token_ids for completion in engine.generate(asked)])
    assert answers[0] == answers[1]
    assert "it/s" not in capfd.readouterr().err, "no progress bar of transformers"
    assert "unpacking the weights of mixture.gguf" in caplog.text


@pytest.mark.parametrize("begins", [None, False, True])
def test_words_of_llama_3_are_tokens_before_they_are_merged(
    begins: bool | None, tmp_path: Path, smollm2_gguf: Path
) -> None:
    """And its texts begin with a token, as llama.cpp reads a file that says nothing about it."""
    fields = read_tokenizer(smollm2_gguf)
    tokens = fields["tokenizer.ggml.tokens"][1][: TOKENS - 1]
    changed = {"pre": "llama-bpe", "add_bos_token": begins, "tokens": [*tokens, "qzx"]}
    changed["merges"] = [
        merge for merge in fields["tokenizer.ggml.merges"][1] if {*merge.split(), merge.replace(" ", "")} <= {*tokens}
    ]
    changed = {f"tokenizer.ggml.{name}": values for name, values in changed.items()}
    write_mixture(tmp_path / "model.gguf", smollm2_gguf, changed=changed)
    codec = TextCodec.load(resolve_checkpoint(tmp_path / "model.gguf"))
    first = [] if begins is False else [codec.tokenizer.token_to_id("<|im_start|>")]
    assert codec.encode(["qzx"], add_special_tokens=True) == [[*first, TOKENS - 1]]


def words_of(file: Path, text: str) -> str:
    """A text's tokens as a night has them, with lines between them."""
    codec = TextCodec.load(resolve_checkpoint(file))
    (token_ids,) = codec.encode([text], add_special_tokens=False)
    return "|".join(codec.decode([token_id]) for token_id in token_ids)


@pytest.mark.parametrize("pre", ["smollm", "starcoder", "refact"])
def test_each_digit_is_a_word_where_llama_cpp_has_it_so(pre: str, tmp_path: Path, smollm2_gguf: Path) -> None:
    """Also in a file of Qwen3, for which transformers has a class with words of its own. The tokens are llama.cpp's."""
    assert words_of(smollm2_gguf, "Steps:\n\n1. Foo\n    20") == "Steps|:|\n\n|1|.| F|oo|\n    |2|0"
    write_mixture(tmp_path / "model.gguf", smollm2_gguf, changed={"tokenizer.ggml.pre": pre})
    assert words_of(tmp_path / "model.gguf", "is    2") == "is|    |2"


@pytest.mark.parametrize(("pre", "words"), [("gpt-2", "(|i"), ("qwen2", "(i")])
def test_a_file_has_the_words_that_it_names(pre: str, words: str, tmp_path: Path, smollm2_gguf: Path) -> None:
    """And not those of the class that transformers has for its architecture."""
    changed = {"pre": pre, "tokens": [*read_tokenizer(smollm2_gguf)["tokenizer.ggml.tokens"][1][: TOKENS - 1], "(i"]}
    changed |= {"merges": ["( i"]}
    fields = {f"tokenizer.ggml.{name}": values for name, values in changed.items()}
    write_mixture(tmp_path / "model.gguf", smollm2_gguf, changed=fields)
    assert words_of(tmp_path / "model.gguf", "(i") == words


def test_words_that_are_not_known_are_refused(tmp_path: Path, smollm2_gguf: Path) -> None:
    write_mixture(tmp_path / "model.gguf", smollm2_gguf, changed={"tokenizer.ggml.pre": "deepseek-llm"})
    why = r"tokenizer\.ggml\.pre is 'deepseek-llm'; it is not known here how such texts are split into words; use "
    with pytest.raises(ModelError, match=rf"^model '.*model\.gguf': {why}"):
        resolve_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize("pre", [None, "default"])
def test_a_file_that_names_no_words_has_gpt2s_with_a_warning(
    pre: str | None, tmp_path: Path, smollm2_gguf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_mixture(tmp_path / "model.gguf", smollm2_gguf, changed={"tokenizer.ggml.pre": pre})
    resolve_checkpoint(tmp_path / "model.gguf")
    assert "model.gguf: tokenizer.ggml.pre does not say how texts are split into words" in caplog.text


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_weights_that_a_file_lacks_are_not_made_up(dtype: str, tmp_path: Path, smollm2_gguf: Path) -> None:
    write_mixture(tmp_path / "model.gguf", smollm2_gguf, without="blk.1.attn_v")
    lacks = r"model\.gguf': (lacks the tensor blk\.1|its files lack 1 weights, model\.layers\.1\.self_attn\.v_proj)"
    with pytest.raises(ModelError, match=lacks):
        Engine.load(tmp_path / "model.gguf", EngineConfig(dtype=dtype, device="cpu"))


@pytest.mark.parametrize("unread", ["blk.1.attn_output.bias", "blk.1.attn_sub_norm.weight"])
def test_biases_and_norms_that_would_not_be_read_are_refused(unread: str, tmp_path: Path, smollm2_gguf: Path) -> None:
    write_mixture(tmp_path / "model.gguf", smollm2_gguf, unread=unread)
    with pytest.raises(ModelError, match=rf"model\.gguf': its files have {unread}, its configuration says"):
        resolve_checkpoint(tmp_path / "model.gguf")


def test_tensors_that_are_not_needed_may_be_in_a_file(tmp_path: Path, smollm2_gguf: Path) -> None:
    write_mixture(tmp_path / "model.gguf", smollm2_gguf, unread="blk.1.attn_rot_embd.weight")
    assert resolve_checkpoint(tmp_path / "model.gguf").is_dir()


@pytest.mark.parametrize(
    ("architecture", "endian", "why"),
    [
        ("mpt", gguf.GGUFEndian.LITTLE, "cannot be used: ValueError: .*architecture mpt is not supported"),
        ("llama", gguf.GGUFEndian.BIG, "its numbers are big-endian"),
    ],
)
def test_a_whole_file_that_is_not_computed_is_refused_with_the_reason(
    architecture: str, endian: gguf.GGUFEndian, why: str, tmp_path: Path
) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", architecture, endianess=endian)
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=rf"model\.gguf': {why}"):
        resolve_checkpoint(tmp_path / "model.gguf")


def test_a_part_of_a_model_is_refused(tmp_path: Path, smollm2_gguf: Path) -> None:
    write_mixture(tmp_path / "model-00001-of-00003.gguf", smollm2_gguf, num_parts=3)
    with pytest.raises(ModelError, match=r"003\.gguf': it is one of 3 parts of a model; join them with `llama-gguf-"):
        resolve_checkpoint(tmp_path / "model-00001-of-00003.gguf")


def test_a_full_cache_folder_is_named(smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that writes the tokenizer raises an error without a number."""
    monkeypatch.setenv("BATCHLOOM_CACHE", str(tmp_path / "cache"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, limits[1]))  # larger than the table of tensors
    try:
        with pytest.raises(ModelError) as caught:
            resolve_checkpoint(smollm2_gguf)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    kept = (
        rf"{tmp_path}/cache, which cannot be written: File too large; [\d,]+ bytes free; name another folder in BATCH"
    )
    assert re.search(kept, str(caught.value))
    assert not list((tmp_path / "cache").glob("*"))
