"""Texts and pairs that are too long are cut as transformers' tokenizers cut them, whatever the tokenizer is."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from engine.errors import ModelError
from tasks.answers.embed import Embedding
from tasks.answers.head_score import PAIR_MARK, HeadScore, find_pair_separator
from tasks.prompts.prompt import PromptEncoder, build_prompt_format
from tasks.prompts.text_codec import TextCodec
from tasks.prompts.text_limit import limit_prompts, share_tokens
from tasks.workloads.workload import Prompt
from tests.conftest import TOKENIZER_TEXT

LIMIT = 16
PLAIN = Prompt(template="{a}", chat=False)
TEXTS = [(TOKENIZER_TEXT[i][: 9 * i + 5], TOKENIZER_TEXT[-i - 1][: 70 - 9 * i]) for i in range(6)] + [("night", "He")]


def save_word_piece(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        TOKENIZER_TEXT, trainers.WordPieceTrainer(vocab_size=200, special_tokens=specials, show_progress=False)
    )
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    save(tokenizer, folder, pad_token="[PAD]", unk_token="[UNK]")


def save_unigram(folder: Path) -> None:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=specials, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TOKENIZER_TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    save(tokenizer, folder, pad_token="<pad>", unk_token="<unk>")


def save(tokenizer: Tokenizer, folder: Path, **names: str) -> None:
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LIMIT, **names)
    wrapped.save_pretrained(folder)
    (folder / "config.json").write_text(
        '{"model_type": "bert", "max_position_embeddings": 99, "architectures": ["BertForSequenceClassification"]}'
    )


@pytest.mark.parametrize(("own", "limit"), [(20, 20), (8, 8), (None, LIMIT), (200, 99)])
def test_a_limit_for_embeddings_takes_the_place_of_the_tokenizer_s(own: int | None, limit: int, tmp_path: Path) -> None:
    """As in sentence-transformers; positions end at 99."""
    save_word_piece(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": own}))
    codec = TextCodec.load(tmp_path)
    assert limit_prompts(iter, Embedding(output={"table": "t"}), PLAIN, codec, tmp_path, 99)[0] == limit


@pytest.mark.parametrize("make", [save_word_piece, save_unigram])
@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("side", ["right", "left"])
def test_prompts_are_those_of_the_tokenizer(make: object, is_pair: bool, side: str, tmp_path: Path) -> None:
    make(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"truncation_side": side}))
    kind = HeadScore(labels="checkpoint", pair="{b}" if is_pair else "", output={"table": "t"})
    kind, template = kind.bind(kind.join("{a}"), tmp_path)
    assert PAIR_MARK not in template
    assert kind.bind(template, tmp_path) == (kind, template), "binding again changes nothing"
    TextCodec.load(tmp_path)  # which keeps a copy, to be read again
    TextCodec._load_once.cache_clear()
    codec = TextCodec.load(tmp_path)
    prompt = Prompt(template=template, chat=False)
    encoder = PromptEncoder(build_prompt_format(prompt, codec), codec)
    limit, encode = limit_prompts(encoder.encode, kind, prompt, codec, tmp_path, 10_000)
    assert limit == LIMIT
    found = [prompt.tolist() for prompt in encode([{"a": a, "b": b} for a, b in TEXTS])]
    stock = transformers.AutoTokenizer.from_pretrained(tmp_path)
    pairs = [list(texts) for texts in zip(*TEXTS, strict=True)]
    expected = stock(*pairs[: 1 + is_pair], truncation=True)["input_ids"]
    assert found == expected
    assert {len(prompt) for prompt in found} > {LIMIT}, "some are cut, some are not"


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_chat_template_and_the_text_behind_the_last_column_stay(
    side: str, tiny_llama: Path, tmp_path: Path
) -> None:
    """The last token is pooled: it must be the same in all rows."""
    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"truncation_side": side}))
    codec, kind = TextCodec.load(tmp_path), Embedding(output={"table": "t"})
    prompt = Prompt(template="{a}\nIn a word:", chat=True)
    encode = PromptEncoder(build_prompt_format(prompt, codec), codec).encode
    _, encode_cut = limit_prompts(encode, kind, prompt, codec, tmp_path, 60)
    words = [f"{number} watchmen" for number in range(40)]
    short, long = encode_cut([{"a": words[0]}, {"a": " ".join(words)}])
    assert short.tolist() == next(iter(encode([{"a": words[0]}]))).tolist()
    assert len(long) == 60
    text = codec.tokenizer.decode(long.tolist(), skip_special_tokens=False)
    head, tail = "<|im_start|>user\n", "\nIn a word:<|im_end|>\n<|im_start|>assistant\n"
    assert text.startswith(head + words[0]) if side == "right" else words[-1] + tail in text
    assert text.startswith(head)
    assert text.endswith(tail)
    few = limit_prompts(encode, kind, prompt, codec, tmp_path, 5)[1]([{"a": words[0]}])
    assert len(next(iter(few))) > 5, "an error row"


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 60))
def test_the_longer_text_is_cut(num_first: int, num_second: int, limit: int) -> None:
    if num_first + num_second <= limit:
        return
    first, second = share_tokens(num_first, num_second, limit)
    assert first + second == limit
    assert first <= num_first
    assert second <= num_second
    for kept, all_tokens, other in ((first, num_first, second), (second, num_second, first)):
        assert kept == all_tokens or kept >= other - 1, "a text that is cut is not the shorter one"


def test_longer_texts_as_errors(tmp_path: Path) -> None:
    save_word_piece(tmp_path)
    kind = HeadScore(labels="checkpoint", too_long="error", output={"table": "t"})
    assert limit_prompts(iter, kind, PLAIN, TextCodec.load(tmp_path), tmp_path, 9) == (9, iter)


def test_a_tokenizer_without_pairs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        find_pair_separator(tmp_path)
    save_word_piece(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="no form for a pair"):
        find_pair_separator(tmp_path)


def test_short_prompts_stay(tmp_path: Path) -> None:
    save_unigram(tmp_path)
    kind = HeadScore(labels="checkpoint", output={"table": "t"})
    _, encode = limit_prompts(iter, kind, PLAIN, TextCodec.load(tmp_path), tmp_path, 10_000)
    prompt = np.arange(LIMIT, dtype=np.int32)
    (found,) = encode([prompt])
    assert found is prompt
