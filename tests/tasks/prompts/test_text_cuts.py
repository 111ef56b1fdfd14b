"""Cut texts have the token ids of whole ones, always: for each family of tokenizers, over texts full of traps."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tasks.prompts.prompt import PromptEncoder, build_prompt_format
from tasks.prompts.text_codec import TextCodec
from tasks.workloads.workload import Prompt

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "the dog's house, don't they're I'll WE'VE the end. The End: \"quoted\" (in brackets) [or not] {at all}",
    "Question: what is 1234567 + 89? Answer: 1,234,656!\n\n\n  indented\n\tmore\r\n\r\nlines  \n and   spaces",
    "na\u00efve caf\u00e9 e\u0301le\u0300ve \u6771\u4eac \u6771\u4eac \U0001f600 a<b>c</b> x|y n: n: e, e, s. s? d! d!",
    *["the dog walks: the dog, the cat. the end\n", "the dog's the cat's the dog's "] * 20,
]
TRAPS = [
    *(
        "a",
        "the",
        "Dog",
        "ABC",
        "n",
        "e\u0301",
        "\u0301",
        "\u00e9",
        "\ufb01",
        "\u017f",
        "\u0130",
        "\u6771\u4eac",
        "\u0644\u0627",
    ),
    *(
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "\u00a0",
        "\u2028",
        "\x0b",
        "\u200d",
        "\u3000",
        "\u2581",
        "\u2581\u2581",
    ),
    *("'", "'s", "'S", "'ll", "'\u017f", ":", ": ", ", ", ".", "?", "!", "(", ")", '"', "<", ">", "/", "_", "-", "|"),
    *("1", "12", "123", "1234", "\u0663", "\u00b2", "\U0001f600", "\x00", "<|im_end|>", "<s>", "[INST]", "ing", "d, b"),
]
TEXTS = st.lists(st.sampled_from(TRAPS) | st.characters(codec="utf-8"), max_size=14).map("".join)
CONTROL = ["<s>", "<|im_end|>", "[INST]"]


def trained(pre_tokenizer: object, normalizer: object = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=520, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    return tokenizer


def by_pattern(pattern: str) -> object:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def with_added_words() -> Tokenizer:
    tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.add_tokens([AddedToken("d, b", normalized=True), AddedToken("ing", lstrip=True), AddedToken("   ")])
    return tokenizer


def prepended(added: Sequence[str] = ()) -> Tokenizer:
    """As Llama 2's."""
    tokenizer = spaced(None, normalizers.Sequence([normalizers.Prepend("\u2581"), REPLACE]))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    return tokenizer


def spaced(pre_tokenizer: object, normalizer: object = None) -> Tokenizer:
    """Pieces as SentencePiece makes them: a blank only at the start of a piece, bytes for unknown characters."""
    pieces = ["<unk>", *CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581\u2581", "\n", "\n\n"]
    pieces += [
        *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:'<>123",
        "th",
        "the",
        "\u2581t",
        "\u2581the",
        "e,",
        "g\n",
    ]
    merges = [
        ("t", "h"),
        ("\u2581", "t"),
        ("\u2581", "\u2581"),
        ("th", "e"),
        ("\u2581", "the"),
        ("e", ","),
        ("g", "\n"),
        ("\n", "\n"),
    ]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=merges,
        byte_fallback=True,
        unk_token="<unk>",
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A [INST]", special_tokens=[("<s>", 1), ("[INST]", 3)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    return tokenizer


REPLACE = normalizers.Replace(" ", "\u2581")
CUTTABLE: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm2": lambda: trained(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ),
    "llama3": lambda: trained(by_pattern(LLAMA_3)),
    "qwen2": lambda: trained(by_pattern(QWEN_2), normalizers.NFC()),
    "o200k": lambda: trained(by_pattern(O200K), normalizers.NFKC()),
    "added words": with_added_words,
    "metaspace": lambda: spaced(pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "metaspace words": lambda: spaced(pre_tokenizers.Metaspace(prepend_scheme="always", split=True)),
    "llama2": prepended,
    "llama2 with added words": lambda: prepended(["ing", "d, b", "  ", "   "]),
    "no prefix": lambda: spaced(None, REPLACE),
}


@cache
def codec_of(family: str) -> TextCodec:
    return TextCodec(CUTTABLE[family]())


def trusted(codec: TextCodec, text: str) -> str:
    """Some control tokens of the text are meant, others are not."""
    half = len(text) // 2
    return codec.trust(text[:half]) + text[half:]


@pytest.mark.parametrize("family", CUTTABLE)
@given(text=TEXTS)
@example("the dog <s>")
@example("the <s> dog, <s>the  dog")
@example("a [INST]b  [INST] c")
@example("dog, bing ing: ing")
@example("the dog's cat's")
@example("bing the ing, the  dog")
def test_cut_texts_have_the_ids_of_whole_ones(family: str, text: str) -> None:
    codec = codec_of(family)
    assert codec.cuts is not None
    for whole in (trusted(codec, text), text + codec.trust("<s>"), f"the {text} the"):
        cuts = sorted({codec.cuts.last(whole, end, end) for end in range(1, len(whole) + 1)} - {-1})
        bounds = [0, *cuts, len(whole)]
        pieces = [whole[: cuts[0]] if cuts else whole]
        pieces += [codec.cuts.behind(whole[start:end]) for start, end in pairwise(bounds) if start]
        expected, *found = codec.encode([whole, *pieces], add_special_tokens=False)
        assert [token for ids in found for token in ids] == expected, pieces


@pytest.mark.parametrize("family", CUTTABLE)
@given(rows=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=6), chat=st.booleans())
def test_prompts_in_pieces_are_whole_prompts(family: str, rows: list[tuple[str, str]], chat: bool) -> None:
    codec = codec_of(family)
    template = "Document:\n{body}\n\nQuestion: {query}\nAnswer:" if chat else "{query}{body} {query}<s> {body}\n"
    form = build_prompt_format(Prompt(system="", template=template, chat=False, may_be_empty=()), codec)
    values = [{"body": body * 9, "query": query} for body, query in rows]
    expected = codec.encode([form.place(row)[0] for row in values], add_special_tokens=True)
    encoder = PromptEncoder(form, codec)
    for _ in range(2):  # pieces that are new, pieces that are known
        assert [prompt.tolist() for prompt in encoder.encode(values)] == expected


def changed(family: str, change: Callable[[dict], object]) -> Tokenizer:
    spec = json.loads(CUTTABLE[family]().to_str())
    change(spec)
    return Tokenizer.from_str(json.dumps(spec))


UNSAFE: dict[str, Callable[[], Tokenizer]] = {
    "a blank put before the text": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "an unknown pattern": lambda: trained(by_pattern(QWEN_2.replace(r"\s+(?!\S)", r"\s+(?!\S)|the dog|\S+(?= )"))),
    "a pattern for bytes": lambda: trained(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                pre_tokenizers.Split(Regex(QWEN_2), "isolated"),
            ]
        )
    ),
    "a pattern that knows no letters": lambda: trained(by_pattern(r"\p{N}|\s+")),
    "no words": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    "lower case": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Lowercase()),
    "dropout": lambda: changed("gpt2", lambda spec: spec["model"].update(dropout=0.1)),
    "a token that takes the blank after it": lambda: changed(
        "gpt2", lambda spec: spec["added_tokens"][0].update(rstrip=True)
    ),
    "a token that is a word": lambda: changed("gpt2", lambda spec: spec["added_tokens"][0].update(single_word=True)),
    "a piece over a blank": lambda: changed(
        "llama2", lambda spec: spec["model"]["vocab"].update({"e\u2581": len(spec["model"]["vocab"])})
    ),
    "a text that is a piece": lambda: changed("llama2", lambda spec: spec["model"].update(ignore_merges=True)),
    "unigram": lambda: Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("\u2581", -1.0)], unk_id=0)),
    "word pieces": lambda: Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
}


@pytest.mark.parametrize("family", UNSAFE)
def test_what_is_not_known_to_be_exact_is_not_cut(family: str) -> None:
    codec = TextCodec(UNSAFE[family]())
    assert codec.cuts is None


def test_a_prompt_that_would_differ_ends_all_cutting() -> None:
    """The check on the first prompts, with cuts that are wrong on purpose."""
    codec = codec_of("gpt2")
    wrong = TextCodec(CUTTABLE["gpt2"]())
    wrong.cuts = codec.cuts and type(codec.cuts)(pairs=frozenset({"th"}), drops_space=False, added=())
    form = build_prompt_format(Prompt(system="", template="{a}{b}", chat=False, may_be_empty=()), wrong)
    rows = [{"a": "the cat the", "b": "the dog"}] * 2
    encoder = PromptEncoder(form, wrong)
    expected = codec.encode(["the cat thethe dog"] * 2, add_special_tokens=True)
    assert [prompt.tolist() for prompt in encoder.encode(rows)] == expected
    assert [prompt.tolist() for prompt in encoder.encode(rows)] == expected
