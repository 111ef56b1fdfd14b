"""The engine's promises to its caller: order, seeds, stops, counts, and refusals before any work."""

import contextlib
import copy
import dataclasses
import itertools
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine import Completion, Engine, EngineConfig, PrefixGroup, Request, StepRecord, Thinking, plan_prefix_groups
from engine.errors import BusyError, CapacityError, ConfigError, ModelError, OutOfMemoryError, RequestError
from engine.planning.group import CommonPrefix, Member

SETTINGS = EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 24)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Engine:
    return Engine.load(tiny_llama, SETTINGS)


def prompts(count: int = 12) -> list[list[int]]:
    rng = random.Random(3)
    document = [rng.randrange(3, 500) for _ in range(30)]
    return [document[: rng.choice([12, 30])] + [rng.randrange(3, 500) for _ in range(1 + i % 9)] for i in range(count)]


def spell(token_ids: Sequence[int]) -> str:
    """A decoder for stop strings: each token is a letter."""
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


def test_results_come_in_input_order_and_do_not_depend_on_it(tiny_llama: Path, engine: Engine) -> None:
    requests = [
        Request(request_id=f"r{i}", token_ids=p, max_new_tokens=10, temperature=0.9 * (i % 2), seed=i)
        for i, p in enumerate(prompts())
    ]
    plain = engine.generate(requests)
    assert [answer.request_id for answer in plain] == [request.request_id for request in requests]
    by_id = {answer.request_id: answer.token_ids for answer in plain}
    shuffled = random.Random(1).sample(requests, len(requests))
    for answer in engine.generate(shuffled):
        assert answer.token_ids == by_id[answer.request_id]
    for part in (requests[:5], requests[5:]):
        for answer in engine.generate(part):
            assert answer.token_ids == by_id[answer.request_id]
    chunked = Engine.load(
        tiny_llama, EngineConfig(dtype="float32", device="cpu", max_num_batched_tokens=7, block_size=4)
    )
    for answer in chunked.generate(requests):
        assert answer.token_ids == by_id[answer.request_id]


def test_settings_of_draws_at_their_limits(engine: Engine) -> None:
    def draw(**settings: Any) -> Sequence[int]:
        request = Request(request_id="a", token_ids=[5, 6, 7], max_new_tokens=20, **settings)
        return engine.generate([request])[0].token_ids

    for settings in ({"temperature": 5e-324}, {"temperature": 5.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-30}):
        assert draw(**settings) == draw()
    for settings in ({"top_k": 512}, {"top_k": 10**30}, {"top_p": 1}):
        assert draw(temperature=1.0, **settings) == draw(temperature=1.0)
    assert draw(temperature=1e308, seed=2**64 - 1) != draw()


def test_sampled_answers_depend_on_their_seed_alone(engine: Engine) -> None:
    def draw(seed: int) -> tuple[int, ...]:
        request = Request(request_id="a", token_ids=[5, 6, 7], max_new_tokens=20, temperature=1.5, seed=seed)
        return tuple(engine.generate([request])[0].token_ids)

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(8)}) > 4


def test_identical_prompts_are_computed_once_and_answered_each(engine: Engine) -> None:
    prompt = prompts(1)[0]
    answers = engine.generate([Request(request_id=str(i), token_ids=prompt, max_new_tokens=6) for i in range(4)])
    assert len({answer.token_ids for answer in answers}) == 1
    copies = (Request(request_id=str(i), token_ids=prompt, max_new_tokens=6) for i in range(4))
    assert [answer.token_ids for answer in engine.generate(copies)] == [answer.token_ids for answer in answers]
    assert sorted(answer.num_prompt_tokens - answer.num_cached_tokens for answer in answers) == [0, 0, 0, len(prompt)]


def test_computed_tokens_are_accounted_to_requests_exactly(engine: Engine) -> None:
    requests = [Request(request_id=str(i), token_ids=p, max_new_tokens=4) for i, p in enumerate(prompts(40))]
    steps: list[StepRecord] = []
    groups = plan_prefix_groups(prompts(40))
    answers = list(engine.run_plan(requests, groups, on_step=steps.append))
    computed = sum(answer.num_prompt_tokens - answer.num_cached_tokens for answer in answers)
    assert computed == sum(step.num_prefix_tokens + step.num_suffix_tokens for step in steps)
    assert sum(step.num_finished_requests for step in steps) == len(answers) == 40
    assert [step.step for step in steps] == list(range(len(steps)))


@pytest.mark.parametrize("overlaps_steps", [False, True])
@pytest.mark.parametrize("fails_in", ["on_step", "forward"])
def test_a_run_that_fails_has_given_all_answers_that_its_steps_finished(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, overlaps_steps: bool, fails_in: str
) -> None:
    """Also answers that ended early, whose last row is still in flight where steps overlap."""
    engine = Engine.load(tiny_llama, dataclasses.replace(SETTINGS, attention="torch", max_num_batched_tokens=50))
    engine._overlaps_steps = overlaps_steps  # which only a GPU's engine does by itself
    requests = [
        Request(request_id=str(i), token_ids=p, max_new_tokens=12, stop=tuple("abcd")) for i, p in enumerate(prompts())
    ]
    groups = plan_prefix_groups([request.token_ids for request in requests])
    forward = engine._runner.forward

    def run(num_steps: int) -> list[Completion]:
        """The answers of a run whose step after `num_steps` others fails; its records go to `steps`."""
        answers, num_launched = list[Completion](), itertools.count()
        steps.clear()

        def note(step: StepRecord) -> None:
            steps.append(step)
            if fails_in == "on_step" and len(steps) == num_steps:
                raise TimeoutError

        def launch(*batch: Any) -> torch.Tensor:
            if fails_in == "forward" and next(num_launched) == num_steps:
                raise TimeoutError
            return forward(*batch)

        monkeypatch.setattr(engine._runner, "forward", launch)
        with contextlib.suppress(TimeoutError):
            for answer in engine.run_plan(requests, groups, decode=spell, on_step=note):
                answers.append(answer)
        return answers

    steps: list[StepRecord] = []
    assert len({answer.num_output_tokens for answer in run(-1)}) > 4
    for num_steps in range(1, len(steps) + 1):
        answers = run(num_steps)
        assert len(answers) == sum(step.num_finished_requests for step in steps)


def test_a_model_that_computes_nan_gives_no_answers(tiny_llama: Path) -> None:
    """Token 0 and scores of NaN otherwise, as if they were answers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float16)
    model.get_decoder().layers[0].mlp.down_proj.weight.data *= 1e5
    settings = dataclasses.replace(SETTINGS, dtype="float16")
    broken, labels = Engine.load(model, settings), ((5,), (6,))
    with pytest.raises(
        FloatingPointError, match="the model computed NaN, as float16 does beyond 65,504: set dtype to auto"
    ):
        broken.generate([Request(request_id="a", token_ids=[5, 6, 7], max_new_tokens=4)])
    with pytest.raises(FloatingPointError, match="the model computed NaN"):
        broken.score([Request(request_id="a", token_ids=[5, 6, 7], mode="score", labels=labels)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["torch", "native"])
def test_nan_of_a_failed_call_spoils_no_later_answer(tiny_llama: Path, attention: Any, dtype: Any) -> None:
    """Blocks are used again, and behind a shorter prompt still hold the KV of the failed one."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    settings = dataclasses.replace(SETTINGS, dtype=dtype, attention=attention, block_size=32)
    requests = [Request(request_id=str(n), token_ids=range(5, 5 + n), max_new_tokens=4) for n in (3, 11, 40)]
    expected = Engine.load(copy.deepcopy(model), settings).generate(requests)
    model.get_input_embeddings().weight.data[499] = torch.nan
    engine = Engine.load(model, settings)
    failing = Request(request_id="NaN", token_ids=[499] * 200, max_new_tokens=4)
    with pytest.raises(FloatingPointError):
        engine.generate([failing])
    assert [answer.token_ids for answer in engine.generate(requests)] == [answer.token_ids for answer in expected]


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_torch_s_default_dtype_changes_nothing(tiny_llama: Path, dtype: Any, default: torch.dtype) -> None:
    settings = dataclasses.replace(SETTINGS, dtype=dtype, attention="native", block_size=32)
    requests = [Request(request_id=str(n), token_ids=[*range(5, 60), n], max_new_tokens=4) for n in range(5)]
    expected = Engine.load(tiny_llama, settings).generate(requests)
    try:
        torch.set_default_dtype(default)
        found = Engine.load(tiny_llama, settings).generate(requests)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]


def test_an_answer_ends_at_eos_at_a_stop_string_or_at_its_length(engine: Engine) -> None:
    prompt = prompts(1)[0]
    whole = engine.generate([Request(request_id="a", token_ids=prompt, max_new_tokens=30, ignore_eos=True)])[0]
    assert (whole.finish_reason, whole.num_output_tokens) == ("length", 30)
    text = spell(whole.token_ids)
    request = Request(request_id="a", token_ids=prompt, max_new_tokens=30, stop=(text[10:13],), ignore_eos=True)
    stopped = engine.generate([request], decode=spell)[0]
    assert stopped.finish_reason == "stop"
    assert stopped.num_output_tokens == text.index(text[10:13]) + 3
    assert stopped.token_ids == whole.token_ids[: stopped.num_output_tokens]


def test_an_answer_ends_with_its_eos_token(tiny_llama: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama)
    free = Engine.load(model, SETTINGS).generate([Request(request_id="a", token_ids=[9, 8, 7], max_new_tokens=9)])[0]
    model.generation_config.eos_token_id = [free.token_ids[4]]
    ended = Engine.load(model, SETTINGS).generate([Request(request_id="a", token_ids=[9, 8, 7], max_new_tokens=9)])[0]
    assert ended.finish_reason == "eos"
    assert ended.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[4]) + 1]


@pytest.mark.parametrize("named", ["<|end|>", {"__type": "AddedToken", "content": "<|end|>"}])
def test_an_answer_ends_at_the_tokenizer_s_end_token_too(tiny_llama: Path, tmp_path: Path, named: object) -> None:
    """config.json of some fine-tunes names that of the base model alone."""
    request = Request(request_id="a", token_ids=[9, 8, 7], max_new_tokens=9)
    whole = Engine.load(tiny_llama, SETTINGS)
    (free,), own = whole.generate([request]), whole.eos_token_ids
    end = free.token_ids[4]
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    assert Engine.load(folder, SETTINGS).eos_token_ids == own == {2}, "which both name"
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": end, "content": "<|end|>"}]}))
    for older in ({"added_tokens_decoder": {str(end): {"content": "<|end|>"}}}, {}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": named} | older))
        engine = Engine.load(folder, SETTINGS)
        assert engine.eos_token_ids == own | {end}
    (ended,) = engine.generate([request])
    assert ended.finish_reason == "eos"
    assert ended.token_ids == free.token_ids[: free.token_ids.index(end) + 1]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 600, "content": "<|end|>"}]}))
    assert Engine.load(folder, SETTINGS).eos_token_ids == own, "not a token that the model does not have"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
        assert Engine.load(folder, SETTINGS).eos_token_ids == own


def test_a_refusal_names_the_request_before_any_work(engine: Engine) -> None:
    good = Request(request_id="good", token_ids=[1], max_new_tokens=1)

    def refused(reason: str, *requests: Request) -> None:
        with pytest.raises(RequestError, match=reason):
            engine.generate(requests)

    refused("'long': the prompt has 1020 tokens, with 10 .* 1030, which exceeds the context of 1024",
            good, Request(request_id="long", token_ids=[1] * 1020, max_new_tokens=10))  # fmt: skip
    refused("'alien': token id 512 is not below the vocabulary size 512", Request(request_id="alien", token_ids=[512]))
    refused("'good': the request_id is used twice", good, good)
    refused("'stops': stop strings need the caller's decoder", Request(request_id="stops", token_ids=[1], stop="x"))
    scored = Request(request_id="s", token_ids=[1], mode="score", labels=((1,), (2,)))
    refused("'s': mode is 'score', expected 'generate'", scored)
    thinking = Thinking(end_token_id=600, closing=(600,), max_tokens=4)
    refused("'t': token id 600", Request(request_id="t", token_ids=[1], max_new_tokens=9, thinking=thinking))
    with pytest.raises(RequestError, match="'l': token ids must not be negative, got -1"):
        engine.score([Request(request_id="l", token_ids=[1], mode="score", labels=((1,), (-1,)))])
    with pytest.raises(RequestError, match="'l': token id 600"):
        engine.score([Request(request_id="l", token_ids=[1], mode="score", labels=((1,), (600,)))])


def test_labels_are_scored_after_a_prompt_that_fills_the_context(engine: Engine) -> None:
    """The prompt's last token predicts a label's first; a label's last token is never computed."""

    def score(num_tokens: int, *labels: Sequence[int]) -> Completion:
        request = Request(request_id="a", token_ids=[5] * num_tokens, mode="score", labels=labels)
        return engine.score([request])[0]

    assert score(1024, [6], [7]).finish_reason == score(1023, [6, 8], [7]).finish_reason == "scored"
    with pytest.raises(RequestError, match="1024 tokens, with 1 for the answer 1025, which exceeds the context"):
        score(1024, [6, 8], [7])


def test_a_plan_answers_the_rest_and_reports_the_impossible(tiny_llama: Path) -> None:
    engine = Engine.load(tiny_llama, EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 16))
    requests = [
        Request(request_id="fits", token_ids=[5, 6], max_new_tokens=3),
        Request(request_id="too big", token_ids=[5] * 900, max_new_tokens=3),
    ]
    answers = {a.request_id: a for a in engine.run_plan(requests, plan_prefix_groups([[5, 6], [5] * 900]))}
    assert answers["fits"].num_output_tokens == 3
    assert answers["too big"].finish_reason == "error"
    assert "KV blocks of 32 tokens, the memory budget holds" in (answers["too big"].error or "")


def test_an_abandoned_run_leaves_the_engine_usable(engine: Engine) -> None:
    requests = [Request(request_id=str(i), token_ids=p, max_new_tokens=4) for i, p in enumerate(prompts())]
    run = engine.run_plan(requests, plan_prefix_groups(prompts()))
    next(run)
    run.close()
    assert len(engine.generate(requests)) == len(requests)


INDUCTOR_WARNS = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is:DeprecationWarning")
"""Of its own imports."""


@pytest.mark.slow
@INDUCTOR_WARNS
def test_compiled_layers_answer_alike(tiny_llama: Path, engine: Engine) -> None:
    requests = [Request(request_id=str(i), token_ids=p, max_new_tokens=6) for i, p in enumerate(prompts())]
    compiled = Engine.load(tiny_llama, dataclasses.replace(SETTINGS, attention="torch", compile="always"))
    assert compiled.generate(requests) == engine.generate(requests)
    assert compiled._model.is_compiled


@INDUCTOR_WARNS
def test_a_broken_compiler_costs_no_answer(tiny_llama: Path, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    import torch._inductor.config
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    requests = [Request(request_id=str(i), token_ids=p, max_new_tokens=6) for i, p in enumerate(prompts())]
    # By torch's own patch: pytest's would leave the setting deleted.
    with fresh_cache(), torch._inductor.config.patch({"cpp.cxx": ("/bin/false",)}):
        fallen_back = Engine.load(tiny_llama, dataclasses.replace(SETTINGS, attention="torch", compile="always"))
        assert fallen_back.generate(requests) == engine.generate(requests)
    assert not fallen_back._model.is_compiled
    assert "going on without compiled layers: InvalidCxxCompiler: No working C++ compiler found" in caplog.text


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": "int4"}, "dtype"),
        ({"block_size": 0}, "block_size"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"kv_memory_bytes": -1}, "kv_memory_bytes"),
        ({"kv_memory_bytes": "1GB"}, "kv_memory_bytes"),
        ({"kv_memory_bytes": True}, "kv_memory_bytes must be 'auto' or a positive whole number, got True"),
        ({"block_size": "32"}, "block_size: Input should be a valid integer, got '32'"),
        ({"deterministic": "x"}, "deterministic: Input should be a valid boolean, got 'x'"),
        ({"device": None}, "device: Input should be a valid string, got None"),
        ({"memory_fraction": 0.0}, "memory_fraction"),
        ({"output_reserve": 2.0}, "output_reserve"),
        ({"num_threads": -1}, "num_threads"),
        ({"compile": "yes"}, "compile"),
        ({"attention": "flash"}, "attention must be one of 'auto', .*'fused', got 'flash'"),
        ({"order": "lifo"}, "order must be one of 'ratio', 'fcfs', 'sjf', 'priority', got 'lifo'"),
        ({"sharing": "radix"}, "sharing"),
        ({"batching": "adaptive"}, "batching"),
        ({"prefill": "half"}, "prefill"),
        ({"packing": "tight"}, "packing"),
        ({"preemption": "abort"}, "preemption"),
        ({"max_running_requests": 0}, "max_running_requests must be 'memory' or a positive whole number, got 0"),
        ({"swap_memory_bytes": -1}, "swap_memory_bytes"),
        ({"disaggregation": "threads"}, "disaggregation must be one of 'none', 'processes', got"),
        ({"disaggregation": "processes", "sharing": "lru"}, "sharing 'lru' needs the KV of the process that decodes"),
        ({"disaggregation": "processes", "preemption": "swap"}, "preemption 'swap' .* to recompute or kill"),
        ({"packing": "prepacked"}, "packing 'prepacked' needs whole prompts, and prefill 'chunked' cuts them"),
    ],
)
def test_a_setting_out_of_range_is_named(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(**settings)


@pytest.mark.parametrize("model", [None, 5, b"model"])
def test_what_is_no_model_is_named(model: Any) -> None:
    with pytest.raises(ModelError, match=rf"model must be .* a hub id, or a loaded model .*, got {model!r}"):
        Engine.load(model, SETTINGS)


def test_a_loaded_model_without_an_output_layer_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match=r"must have an output layer \(AutoModelForCausalLM\), got LlamaModel"):
        Engine.load(transformers.AutoModel.from_pretrained(tiny_llama), SETTINGS)


def test_the_error_for_an_encoder_names_its_engine(minilm: Path) -> None:
    with pytest.raises(ModelError, match="is_causal=False is not supported; encoders: EncoderEngine"):
        Engine.load(minilm, SETTINGS)


def test_arguments_of_other_types_are_named(tiny_llama: Path, engine: Engine) -> None:
    for arguments in ([tiny_llama], [str(tiny_llama), SETTINGS]):
        with pytest.raises(ConfigError, match=r"engine is made by Engine\.load\(model, config\)"):
            Engine(*arguments)
    with pytest.raises(ConfigError, match=r"config must be an EngineConfig, got \{'dtype': 'float32'\}"):
        Engine.load(tiny_llama, {"dtype": "float32"})  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"adapter must be an Adapter, as Adapter\.find\(folder\) makes, got 'lora'"):
        Engine.load(tiny_llama, SETTINGS, adapter="lora")  # type: ignore[arg-type]
    for requests in (None, 5, Request(request_id="a", token_ids=[1])):
        with pytest.raises(RequestError, match="requests must be a list or another iterable of Requests, got"):
            engine.generate(requests)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="requests must hold Requests, got 'a'"):
        engine.generate(["a"])  # type: ignore[list-item]
    with pytest.raises(RequestError, match=r"request \['a'\]: a request_id must be hashable"):
        engine.generate([Request(request_id=["a"], token_ids=[1])])  # type: ignore[arg-type]


def alone(requests: Sequence[Request], commons: Sequence[CommonPrefix | None]) -> list[PrefixGroup]:
    """A group for each request, with a common prefix that was set by hand."""
    return [
        PrefixGroup(
            prefix=request.token_ids[:0],
            members=(Member(request_indices=(index,), suffix=request.token_ids),),
            common=common,
        )
        for index, (request, common) in enumerate(zip(requests, commons, strict=True))
    ]


def test_a_plan_and_its_requests_belong_together(engine: Engine) -> None:
    def run(requests: Sequence[Request], *prompts: Sequence[int]) -> list[Completion]:
        return list(engine.run_plan(requests, plan_prefix_groups(prompts)))

    one, other = (
        Request(request_id=name, token_ids=[5, token], max_new_tokens=2) for name, token in (("a", 6), ("b", 7))
    )
    assert len(run([one, other], [5, 6], [5, 7])) == 2
    with pytest.raises(RequestError, match="request 'b' is in no group"):
        run([one, other], [5, 6])
    with pytest.raises(RequestError, match="request 1 of 1 is in two groups, or does not exist"):
        run([one], [5, 6], [5, 7])
    with pytest.raises(RequestError, match="request 0 of 1 is in two groups, or does not exist"):
        list(engine.run_plan([one], 2 * plan_prefix_groups([[5, 6]])))
    with pytest.raises(RequestError, match="request 'b': its group has another prompt"):
        run([other, one], [5, 6], [5, 7])
    several = [Request(request_id=f"{i}", token_ids=[5, 6, 7, i]) for i in range(2)]
    for commons in (
        [CommonPrefix(num_tokens=9, parent=None)] * 2,
        [CommonPrefix(num_tokens=2, parent=CommonPrefix(num_tokens=3, parent=None))] * 2,
    ):
        with pytest.raises(RequestError, match=r"groups\[0\].common is too long, or has other tokens in"):
            list(engine.run_plan(several, alone(several, commons)))
    different = [one, other, Request(request_id="c", token_ids=[6, 6])]
    shared = CommonPrefix(num_tokens=1, parent=None)
    with pytest.raises(RequestError, match=r"groups\[2\].common is .* has other tokens in another group"):
        list(engine.run_plan(different, alone(different, [shared] * 3)))
    assert len(list(engine.run_plan(different, alone(different, [shared, shared, None])))) == 3
    empty = PrefixGroup(prefix=one.token_ids, members=(), common=CommonPrefix(num_tokens=9, parent=None))
    with pytest.raises(RequestError, match=r"groups\[0\].common is too long"):
        list(engine.run_plan([], [empty]))
    whole, nothing = one.token_ids, one.token_ids[:0]
    group = PrefixGroup(prefix=whole, members=(Member(request_indices=(0,), suffix=nothing),))
    with pytest.raises(RequestError, match=r"request 'a': its group has .* no token after its prefix"):
        list(engine.run_plan([one], [group]))
    lists: Any = {"prefix": [], "members": (Member(request_indices=(0,), suffix=[5, 6]),)}  # type: ignore[arg-type]
    for wrong in (PrefixGroup(**lists), dataclasses.replace(group, prefix=whole.astype("int64"))):
        with pytest.raises(RequestError, match="groups must hold tokens in int32 arrays, in their prefixes and"):
            list(engine.run_plan([one], [wrong]))


def test_what_is_no_decoder_is_named(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="decode must be a function of token ids, got 'x'"):
        engine.generate([Request(request_id="a", token_ids=[5], stop="!")], decode="x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": None}, "requests must be a sequence, got None"),
        ({"requests": [5]}, "requests must hold Requests, got 5"),
        ({"groups": None}, "groups must be a sequence, got None"),
        ({"groups": ["x"]}, "groups must hold PrefixGroups, got 'x'"),
        ({"groups": iter(plan_prefix_groups([[5]]))}, "groups must be a sequence, got <list_iterator"),
        ({"requests": iter([])}, "requests must be a sequence, got <list_iterator"),
        ({"on_step": "x"}, "on_step must be a function of step records, got 'x'"),
    ],
)
def test_what_is_no_plan_is_named(engine: Engine, changes: dict[str, Any], message: str) -> None:
    given = {"requests": [Request(request_id="a", token_ids=[5])], "groups": plan_prefix_groups([[5]])}
    with pytest.raises(ValueError, match=message):
        list(engine.run_plan(**given | changes))


def start(engine: Engine, requests: Sequence[Request]) -> Iterator[Completion]:
    """A run of which the first answer has been taken."""
    run = engine.run_plan(requests, plan_prefix_groups([request.token_ids for request in requests]))
    next(run)
    return run


def test_a_call_of_the_same_thread_ends_an_unfinished_one(engine: Engine) -> None:
    """As a cell of a notebook that is run again. The KV of the unfinished run is gone, so it cannot go on."""
    requests = [Request(request_id=str(i), token_ids=p, max_new_tokens=3 + i) for i, p in enumerate(prompts())]
    expected = engine.generate(requests)
    unfinished = start(engine, requests)
    assert engine.generate(requests) == expected
    with pytest.raises(BusyError, match="another call of the engine has begun, which ended this one"):
        list(unfinished)
    start(engine, requests).close()  # type: ignore[attr-defined]
    assert engine.generate(requests) == expected


def test_a_call_of_another_thread_is_refused(engine: Engine) -> None:
    requests = [Request(request_id=str(i), token_ids=p, max_new_tokens=3 + i) for i, p in enumerate(prompts())]
    expected = engine.generate(requests)
    unfinished = start(engine, requests)
    with ThreadPoolExecutor(1) as other:
        with pytest.raises(BusyError, match="a call of thread 'MainThread' is under way: finish it, or close its"):
            other.submit(engine.generate, requests).result()
        assert len(list(unfinished)) == len(requests) - 1
        assert other.submit(engine.generate, requests).result() == expected
        kept = other.submit(start, engine, requests).result()
    assert engine.generate(requests) == expected, "the thread of the unfinished call has ended"
    kept.close()  # type: ignore[attr-defined]


def test_a_refused_call_compiles_nothing(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would change the layers under the call that is under way."""
    engine = Engine.load(tiny_llama, dataclasses.replace(SETTINGS, attention="torch"))
    requests = [Request(request_id=str(i), token_ids=p, max_new_tokens=3 + i) for i, p in enumerate(prompts())]
    unfinished = start(engine, requests)
    compiled: list[Any] = []
    monkeypatch.setattr("engine.engine.compile_if_long", lambda *given: compiled.append(given))
    with ThreadPoolExecutor(1) as other, pytest.raises(BusyError):
        other.submit(engine.generate, requests).result()
    assert compiled == []
    assert len(list(unfinished)) == len(requests) - 1
    engine.generate(requests)
    assert len(compiled) == 1


def test_threads_that_call_at_once_get_right_answers_or_an_error(engine: Engine) -> None:
    requests = [Request(request_id=str(i), token_ids=p, max_new_tokens=5) for i, p in enumerate(prompts())]
    expected = engine.generate(requests)

    def call(number: int) -> list[Completion] | None:
        try:
            return engine.generate(requests)
        except BusyError:
            return None

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(call, range(40)))
    assert expected in found
    assert all(answers in (None, expected) for answers in found)


def test_a_call_within_a_call_is_refused(engine: Engine) -> None:
    request = Request(request_id="a", token_ids=[5, 6], stop="!")
    with pytest.raises(BusyError, match="a call of thread 'MainThread' is under way"):
        engine.generate([request], decode=lambda token_ids: str(engine.generate([request], decode=spell)))
    assert engine.generate([request], decode=spell)[0].num_output_tokens == 64


def test_a_budget_below_one_block_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(CapacityError, match="budget of 100 bytes holds no block"):
        Engine.load(tiny_llama, EngineConfig(dtype="float32", kv_memory_bytes=100))


def test_a_budget_above_the_memory_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(OutOfMemoryError, match="KV budget of 1,125,899,906,842,624 bytes does not fit into the memory"):
        Engine.load(tiny_llama, EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 50))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "no such model"}, "config.json cannot be used"),
        (
            {"rope_parameters": {"rope_type": "spiral", "rope_theta": 10000.0}},
            "config.json: rope_type 'spiral' is not one of default, dynamic, linear, ",
        ),
        ({"model_type": "mamba"}, "architecture 'mamba' is not supported: .* keep a state in place of KV"),
        ({"is_causal": False}, r"architecture 'llama' is not supported: its attention is not causal, by is_causal of "),
        ({"model_type": "qwen3"}, r"its files lack 4 weights, model\.layers\.0\.self_attn\.k_norm\.weight first"),
    ],
)
def test_what_could_not_be_exact_is_refused_by_name(
    tiny_llama: Path, tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    import json
    import shutil

    folder = tmp_path / "changed"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=reason):
        Engine.load(folder, SETTINGS)


def test_unreadable_checkpoints_are_named(tmp_path: Path, tiny_llama: Path) -> None:
    import shutil

    def refused(path: Path, reason: str) -> None:
        with pytest.raises(ModelError, match=reason):
            Engine.load(path, SETTINGS)

    refused(tmp_path / "absent", "no such file or folder")
    broken = tmp_path / "broken"
    shutil.copytree(tiny_llama, broken)
    (broken / "config.json").write_text("{")
    refused(broken, r"broken/config\.json cannot be read: ")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, "no config.json")
    (tmp_path / "model.bin").write_bytes(b"x")
    refused(tmp_path / "model.bin", "must be a .gguf file")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 64)
    refused(tmp_path / "broken.gguf", "not a readable GGUF file")
    cut = tmp_path / "cut"
    shutil.copytree(tiny_llama, cut)
    weights = next(cut.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    refused(cut, "the weights cannot be read")
