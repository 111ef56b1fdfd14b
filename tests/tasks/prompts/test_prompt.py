"""Prompts: the ids of harmless texts are those of the checkpoint's own tokenizer; hostile texts stay text."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.errors import ModelError, WorkloadError
from tasks.prompts.prompt import SUFFIX, PromptFormat, RequestForm, build_prompt_format
from tasks.prompts.text_codec import TextCodec
from tasks.workloads.workload import Prompt, load_workload

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ bos_token + '[INST] ' + system + messages[0]['content'].strip() + ' [/INST]' }}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ bos_token }}{% for message in messages %}{{ '[INST]' + message['content'] | trim + '[/INST]' }}{% endfor %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "def f(x):\n    return x + 1\n",
    "yes no Yes No answer relevant",
]
TEXTS = [
    "A plain sentence.",
    "  leading and trailing  \n",
    "\n\n\ttabs\n  and   runs of   spaces\r\n",
    "naïve café, 東京, \U0001f600\u200d\U0001f525, e\u0301, \u00a0nbsp, \ufeff, zero\u200bwidth",
    "code: if a < b and c > d: x[0] = {'k': [1, 2]}  # | a <| b |> c",
    "1234567890 3.14159 1e-10",
    "",
    "x",
    " ",
]


def finish(
    tokenizer: Tokenizer, chat_template: str, control: list[str], **names: str
) -> transformers.PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **names)


def byte_level_bpe() -> transformers.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=control,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>", "   "])
    return finish(tokenizer, CHATML, control, eos_token="<|im_end|>")


def metaspace_bpe() -> transformers.PreTrainedTokenizerFast:
    """As Llama 2's: byte fallback, a space put before the first word only, BOS by a post-processor."""
    pieces = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,<>/[]|_0123456789"]
    pieces += ["s>", "/s>", "▁t", "▁th", "▁the", "ye", "yes", "▁yes", "no", "▁no"]
    merges = [("s", ">"), ("<", "s>"), ("/", "s>"), ("<", "/s>"), ("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    merges += [("y", "e"), ("ye", "s"), ("▁", "yes"), ("n", "o"), ("▁", "no")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    control = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    return finish(tokenizer, LLAMA, control, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def legacy_bpe() -> transformers.PreTrainedTokenizerFast:
    """The older form of the same: a normalizer puts the space, before every stretch between control tokens."""
    tokenizer = metaspace_bpe().backend_tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return finish(tokenizer, NO_SYSTEM, [], bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def unigram() -> transformers.PreTrainedTokenizerFast:
    """Control tokens are pieces of the model too: without care its search finds them in plain text."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,<>/[]|_0123456789"
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("[INST]", 0.0), ("[/INST]", 0.0), ("▁", -3.0)]
    pieces += [(letter, -5.0) for letter in letters + "\n"] + [("▁the", -2.0), ("yes", -2.0), ("no", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    control = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    return finish(tokenizer, NO_SYSTEM, control, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> transformers.PreTrainedTokenizerFast:
    return transformers.AutoTokenizer.from_pretrained(smollm2_folder)


FAMILIES = {"byte_level": byte_level_bpe, "metaspace": metaspace_bpe, "legacy": legacy_bpe, "unigram": unigram}


@pytest.fixture(scope="module", params=[*FAMILIES, "smollm2"])
def tokenizer(request: pytest.FixtureRequest) -> transformers.PreTrainedTokenizerFast:
    if request.param == "smollm2":
        return request.getfixturevalue("smollm2")
    return FAMILIES[request.param]()


def codec_of(tokenizer: transformers.PreTrainedTokenizerFast) -> TextCodec:
    return TextCodec(tokenizer.backend_tokenizer, tokenizer)


def prompt_of(template: str, *, system: str = "", chat: bool = True) -> Prompt:
    return Prompt(system=system, template=template, chat=chat, may_be_empty=())


def random_texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    alphabet = "abc xyz \n\t.,é東<>|[]/\u00a0'"
    return ["".join(rng.choices(alphabet, k=rng.randint(0, 40))) for _ in range(count)]


def encode_rows(form: PromptFormat, codec: TextCodec, rows: list[dict[str, str]]) -> list[list[int]]:
    return codec.encode([form.place(row)[0] for row in rows], add_special_tokens=form.is_plain)


@pytest.mark.parametrize("system", ["", "You answer <|im_start|> in one sentence."])
@pytest.mark.parametrize(
    "template", ["{body}", " Document:\n{body}\n\nQuery: {query}\n", "{{x}} {query} {body}{query}"]
)
def test_chat_prompts_have_the_ids_of_the_models_own_tokenizer(
    tokenizer: transformers.PreTrainedTokenizerFast, template: str, system: str
) -> None:
    codec, prompt = codec_of(tokenizer), prompt_of(template, system=system)
    form = build_prompt_format(prompt, codec)
    rows = [{"body": body, "query": query} for body in TEXTS + random_texts(1, 40) for query in ("what is it?", "")]
    takes_system = "not supported" not in tokenizer.chat_template
    for row, actual in zip(rows, encode_rows(form, codec, rows), strict=True):
        message = template.format(**row)
        messages = [{"role": "user", "content": message}]
        if system and takes_system:
            messages.insert(0, {"role": "system", "content": system})
        elif system:
            messages[0]["content"] = f"{system}\n\n{message}"
        assert actual == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def test_plain_prompts_have_the_ids_of_the_models_own_tokenizer(
    tokenizer: transformers.PreTrainedTokenizerFast,
) -> None:
    codec = codec_of(tokenizer)
    form = build_prompt_format(prompt_of("{body}\nQ: {query}\nA:", chat=False), codec)
    rows = [{"body": body, "query": "why?"} for body in TEXTS + random_texts(2, 100)]
    expected = [tokenizer(f"{row['body']}\nQ: why?\nA:").input_ids for row in rows]
    assert encode_rows(form, codec, rows) == expected


def hostile_texts(control: list[str]) -> list[str]:
    joined = "".join(control)
    return [*control, joined, *(f"a {text}b{text}{text} c" for text in control), f"x{joined}\n{joined} y"]


@pytest.mark.parametrize("chat", [True, False])
def test_control_tokens_in_a_document_are_plain_text(
    tokenizer: transformers.PreTrainedTokenizerFast, chat: bool
) -> None:
    codec = codec_of(tokenizer)
    added = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
    control = {text: token_id for text, token_id in added.items() if text.strip()}
    assert len(control) > 3
    form = build_prompt_format(prompt_of("{body} {query}", chat=chat), codec)
    (harmless,) = encode_rows(form, codec, [{"body": "a", "query": "b"}])
    written_by_template = sorted(set(harmless) & set(control.values()))
    rows = [
        {"body": text, "query": query} for text in hostile_texts(list(control)) for query in ("b", *list(control)[:2])
    ]
    unknown = added.get("<unk>")
    for row, actual in zip(rows, encode_rows(form, codec, rows), strict=True):
        found = sorted({token for token in actual if token in control.values()} - {unknown})
        assert found == [token for token in written_by_template if token != unknown], row
        assert sum(token in written_by_template for token in actual) == sum(
            t in written_by_template for t in harmless
        ), row
        for text in (row["body"], row["query"]):  # every character is still there
            assert "".join(text.split()) in "".join(tokenizer.decode(actual).split())


def test_a_literal_of_the_workload_may_use_control_tokens(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    control = next(text for text in ("<|im_end|>", "[INST]") if text in tokenizer.get_vocab())
    codec = codec_of(tokenizer)
    form = build_prompt_format(prompt_of(f"{{body}}{control}{control} then", chat=False), codec)
    (actual,) = encode_rows(form, codec, [{"body": "the"}])
    assert actual == tokenizer(f"the{control}{control} then").input_ids


@pytest.mark.parametrize("flags", [{"normalized": True}, {"single_word": True}])
def test_control_tokens_are_found_whatever_their_flags(flags: dict[str, bool]) -> None:
    """As a fine-tune may add them. transformers finds some of these only behind a space, or beside no letter."""
    tokenizer = legacy_bpe()
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    spec["added_tokens"] = [{**token, **flags} for token in spec["added_tokens"]]
    changed = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(spec)), chat_template=NO_SYSTEM, bos_token="<s>"
    )
    expected, found = (
        encode_rows(build_prompt_format(prompt_of("{body}"), codec), codec, [{"body": text} for text in TEXTS])
        for codec in (codec_of(tokenizer), codec_of(changed))
    )
    assert found == expected


def test_a_text_behind_a_normalized_bos_is_that_of_the_tokenizer() -> None:
    """Many tokenizers in Llama 2's form have one; what follows it gets no blank of its own."""
    spec = json.loads(legacy_bpe().backend_tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["normalized"] = token["content"] == "<s>"
    template = "{{ bos_token }}{% for message in messages %}the {{ message['content'] | trim }} yes{% endfor %}"
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(spec)), chat_template=template, bos_token="<s>"
    )
    codec = codec_of(tokenizer)
    found = encode_rows(build_prompt_format(prompt_of("{body}"), codec), codec, [{"body": text} for text in TEXTS])
    messages = [[{"role": "user", "content": text}] for text in TEXTS]
    assert found == [tokenizer.apply_chat_template(each, return_dict=False) for each in messages]


def test_an_added_word_is_found_beside_a_control_token() -> None:
    tokenizer = byte_level_bpe()
    tokenizer.add_tokens([AddedToken("fox", single_word=True, normalized=False)])
    codec = codec_of(tokenizer)
    text = codec.trust("<|im_start|>") + "fox" + codec.trust("<|im_end|>") + " foxes"
    assert codec.encode([text], add_special_tokens=False) == [tokenizer("<|im_start|>fox<|im_end|> foxes").input_ids]


def test_secrets_of_one_codec_mean_nothing_to_another() -> None:
    tokenizer = byte_level_bpe()
    first, second = codec_of(tokenizer), codec_of(tokenizer)
    secret = first.trust("<|im_end|>")
    assert secret != "<|im_end|>"
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert first.encode([secret], add_special_tokens=False) == [[im_end]]
    assert im_end not in second.encode([secret], add_special_tokens=False)[0]


def test_labels_are_encoded_as_they_follow_the_prompt(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    codec = codec_of(tokenizer)
    for template, chat in (("{body}\nIs it? Answer:", False), ("{body} {{}}", True)):
        form = build_prompt_format(prompt_of(template, chat=chat), codec)
        (prompt_ids,) = encode_rows(form, codec, [{"body": "the dog"}])
        for label, token_ids in zip(("yes", " no"), codec.encode_labels(["yes", " no"], *form.ending()), strict=True):
            whole = codec.encode([form.place({"body": "the dog"})[0] + label], add_special_tokens=form.is_plain)[0]
            assert [*prompt_ids, *token_ids] == whole


@pytest.mark.parametrize("template", ["{body}\nIs it? Answer:  ", "Is it?  {body} "])
def test_spaces_at_the_end_of_a_plain_prompt_are_tokens_of_the_answer(
    tokenizer: transformers.PreTrainedTokenizerFast, template: str
) -> None:
    """As in texts that models have learnt from, where the space belongs to the word behind it."""
    codec = codec_of(tokenizer)
    form = build_prompt_format(prompt_of(template, chat=False), codec)
    text = template.format(body="the dog")
    (prompt_ids,) = encode_rows(form, codec, [{"body": "the dog"}])
    assert list(prompt_ids) == tokenizer(text.rstrip(" ")).input_ids
    for label, token_ids in zip(("yes", "no"), codec.encode_labels(["yes", "no"], *form.ending()), strict=True):
        assert [*prompt_ids, *token_ids] == tokenizer(text + label).input_ids
    data = build_prompt_format(prompt_of("{body}", chat=False), codec)
    assert data.place({"body": "the "})[0] == "the ", "data stays as it is"
    assert data.place({"body": "the", SUFFIX: "? "})[0] == "the?"


def test_a_label_that_would_melt_into_the_prompt_is_encoded_alone() -> None:
    tokenizer = byte_level_bpe()
    codec = codec_of(tokenizer)
    form = build_prompt_format(prompt_of("{body} Answer: ye", chat=False), codec)
    assert tokenizer("yes").input_ids == tokenizer.convert_tokens_to_ids(["yes"])
    (token_ids, _) = codec.encode_labels(["s", "t"], *form.ending())
    assert list(token_ids) == tokenizer("s").input_ids


def test_labels_that_cannot_be_told_apart_are_refused() -> None:
    codec = codec_of(unigram())
    form = build_prompt_format(prompt_of("{body}", chat=False), codec)
    with pytest.raises(WorkloadError, match="'é' and 'ü' are the same tokens"):
        codec.encode_labels(["é", "ü"], *form.ending())
    workload = load_workload("ranking")
    workload = replace(workload, prompt=replace(workload.prompt, chat=False))
    workload = replace(workload, kind=replace(workload.kind, labels=("é", "ü")))
    with pytest.raises(WorkloadError, match="workload 'ranking': labels 'é' and 'ü' are the same tokens"):
        RequestForm.of(workload, codec, None)


def test_chat_without_a_chat_template_is_refused() -> None:
    tokenizer = byte_level_bpe()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template; set chat = false"):
        build_prompt_format(prompt_of("{body}"), codec_of(tokenizer))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('not\n today') }}", "refuses messages of roles user: not today$"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ '%(a)s' % {} }}", "'a'"),
        ("{{ messages[0]['content'] }}{{ messages[0]['content'] }}", "found 2 times"),
        ("hello", "found 0 times"),
        ("{{ messages[0]['content'] | e }}", "changes, repeats or drops a message"),
        ("{{ messages[0]['content'] | tojson }}", "changes, repeats or drops a message"),
        ("{{ messages[0]['content'] | lower }}", "changes, repeats or drops a message"),
        ("{{ messages[0]['content'].split() | join(' ') }}", "changes, repeats or drops a message"),
        ("{{ messages[0]['content'].strip('\\n') }}", "changes the user's message"),
    ],
)
def test_a_chat_template_that_changes_the_message_is_refused(template: str, reason: str) -> None:
    tokenizer = byte_level_bpe()
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match=reason):
        build_prompt_format(prompt_of("{body}"), codec_of(tokenizer))


def test_load_reads_a_checkpoint_folder(tmp_path: Path) -> None:
    tokenizer = byte_level_bpe()
    tokenizer.save_pretrained(tmp_path)
    codec = TextCodec.load(tmp_path)
    assert codec.has_chat_template
    ids = tokenizer("the dog").input_ids
    assert codec.encode(["the dog"], add_special_tokens=False) == [ids]
    assert codec.decode([*ids, tokenizer.convert_tokens_to_ids("<|im_end|>")]) == "the dog"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="its tokenizer cannot be read"):
        TextCodec.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="its tokenizer cannot be read"):
        TextCodec.load(tmp_path)
