"""GGUF files of Llama with a SentencePiece vocabulary, and fields that older or unusual files lack or have."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType

from engine import Engine, EngineConfig, Request
from engine.errors import ModelError
from engine.model.loading.checkpoint import read_json, resolve_checkpoint
from tasks.prompts.text_codec import TextCodec

HIDDEN, HEADS, HEAD_DIM, FEED_FORWARD = 64, 4, 16, 96
PIECES = ["▁", *"aehnlo", "▁h", "▁a", "▁he", "he", "ll", "an", "▁an", "llo", "hello", "▁hello"]
"""The more likely ones come later."""


def write_llama(file: Path, *, num_layers: int = 2, architecture: str = "llama", name: str = "", **fields: Any) -> Path:
    """A Llama of two layers with random weights. `fields` are of its architecture, None where the file has none;
    `add_space_prefix` is the tokenizer's, `is_causal` of the attention."""
    writer, rng = GGUFWriter(file, architecture), np.random.default_rng(0)
    if name:
        writer.add_name(name)
    if "add_space_prefix" in fields:
        writer.add_add_space_prefix(fields.pop("add_space_prefix"))
    if "is_causal" in fields:
        writer.add_causal_attention(fields.pop("is_causal"))
    sizes = {"block_count": num_layers, "context_length": 512, "embedding_length": HIDDEN}
    sizes |= {"feed_forward_length": FEED_FORWARD, "rope.dimension_count": HEAD_DIM}
    sizes |= {"attention.head_count": HEADS, "attention.head_count_kv": HEADS}
    for field, value in (sizes | {field.replace("__", "."): value for field, value in fields.items()}).items():
        if value is not None:
            writer.add_uint32(f"{architecture}.{field}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(PIECES)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_scores([0.0] * 259 + [float(rank - len(PIECES)) for rank in range(len(PIECES))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)

    def add(name: str, *shape: int) -> None:
        weights = rng.normal(size=shape, scale=0.2 if len(shape) > 1 else 1).astype(np.float32)
        writer.add_tensor(f"{name}.weight", weights)

    for name, shape in (("token_embd", (len(tokens), HIDDEN)), ("output_norm", (HIDDEN,))):
        add(name, *shape)
    for layer in ("blk.0", "blk.1"):
        for part in ("attn_norm", "ffn_norm"):
            add(f"{layer}.{part}", HIDDEN)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"{layer}.{part}", HIDDEN, HIDDEN)
        add(f"{layer}.ffn_gate", FEED_FORWARD, HIDDEN)
        add(f"{layer}.ffn_up", FEED_FORWARD, HIDDEN)
        add(f"{layer}.ffn_down", HIDDEN, FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_file_without_a_number_of_kv_heads_has_as_many_as_heads(tmp_path: Path) -> None:
    """As those of the first Llama models; unpacked, too, where transformers leaves query and key heads as they lie."""
    answers = []
    for file in (write_llama(tmp_path / "a.gguf"), write_llama(tmp_path / "b.gguf", attention__head_count_kv=None)):
        engine = Engine.load(file, EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 22))
        asked = [Request(request_id=0, token_ids=[1, *range(240, 270)], mode="score", labels=((5,), (9, 11), (270,)))]
        answers.append(engine.score(asked)[0].label_logprobs)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_a_llama_called_mistral_is_a_llama(dtype: Any, tmp_path: Path) -> None:
    """llama.cpp writes Mistral's models so, which have no window; transformers goes by the name."""
    answers = []
    for name in ("other", "mistral"):
        file = write_llama(tmp_path / f"{name}.gguf", name=name)
        engine = Engine.load(file, EngineConfig(dtype=dtype, device="cpu", kv_memory_bytes=1 << 22))
        asked = [Request(request_id=0, token_ids=[1, *range(240, 270)], mode="score", labels=((5,), (9, 11)))]
        answers.append(engine.score(asked)[0].label_logprobs)
        assert read_json(resolve_checkpoint(file) / "config.json").get("sliding_window") is None
    assert answers[0] == answers[1]


def test_an_architecture_that_the_format_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.gguf': the format has no architecture 'mistral'$"):
        resolve_checkpoint(write_llama(tmp_path / "model.gguf", architecture="mistral"))


def test_more_layers_than_the_file_says_are_refused(tmp_path: Path) -> None:
    file = write_llama(tmp_path / "model.gguf", num_layers=1)
    with pytest.raises(ModelError, match=r"model\.gguf': llama\.block_count says 1 layers, it has blk\.1\.attn_k\."):
        resolve_checkpoint(file)
    assert resolve_checkpoint(write_llama(tmp_path / "more.gguf", num_layers=1, nextn_predict_layers=1))


def test_attention_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    assert resolve_checkpoint(write_llama(tmp_path / "causal.gguf", is_causal=True))
    with pytest.raises(ModelError, match=r"model\.gguf': llama\.attention\.causal is false, which is not supported$"):
        resolve_checkpoint(write_llama(tmp_path / "model.gguf", is_causal=False))


@pytest.mark.parametrize(("number", "pooling"), [(1, "mean"), (2, "cls"), (3, ""), (None, "")])
def test_the_pooling_that_a_file_names_is_computed_or_refused(number: int | None, pooling: str, tmp_path: Path) -> None:
    file = write_llama(tmp_path / "model.gguf", pooling_type=number)
    engine = Engine.load(file, EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 22))
    asked = [Request(request_id=0, token_ids=[1, 240, 250], mode="embed")]
    if not pooling:
        assert len(engine.pool(asked)[0].embedding) == HIDDEN
        return
    with pytest.raises(ModelError, match=f"pooling {pooling} of a causal model is not supported, only lasttoken"):
        engine.pool(asked)


@pytest.mark.parametrize(
    ("prefix", "pieces", "text"),
    [({}, ["▁hello", "▁an"], "hello an"), ({"add_space_prefix": False}, ["hello", "▁an"], " hello an")],
)
def test_a_text_begins_with_a_space_unless_the_file_says_otherwise(
    prefix: dict[str, bool], pieces: list[str], text: str, tmp_path: Path
) -> None:
    codec = TextCodec.load(resolve_checkpoint(write_llama(tmp_path / "model.gguf", **prefix)))
    (token_ids,) = codec.encode(["hello an"], add_special_tokens=True)
    assert token_ids == [1, *(259 + PIECES.index(piece) for piece in pieces)]
    assert codec.decode([259 + PIECES.index(piece) for piece in ("▁hello", "▁an")]) == text
