"""Random nights over a fake clock: what runs when, what a failure takes with it, how often a model is loaded."""

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from tasks.nights.graph import NightStep, Outcome, Wave, check_graph, plan_waves, run_waves


@st.composite
def graphs(draw: st.DrawFn, most: int = 8) -> list[NightStep]:
    """Steps in any order of the file, each after some of those before it in a hidden order."""
    names = [f"s{number}" for number in range(draw(st.integers(1, most)))]
    steps = [
        NightStep(
            name=name,
            model=draw(st.sampled_from("abc")),
            after=tuple(draw(st.sets(st.sampled_from(names[:number]), max_size=3))) if number else (),
        )
        for number, name in enumerate(names)
    ]
    return draw(st.permutations(steps))


def count_loads(models: list[str]) -> int:
    return sum(now != before for now, before in zip(models, ["", *models], strict=False))


def fewest_loads(steps: list[NightStep]) -> int:
    """Over every order of the steps that the graph allows."""
    found = len(steps)
    for order in permutations(steps):
        seen: set[str] = set()
        for step in order:
            if not seen.issuperset(step.after):
                break
            seen.add(step.name)
        else:
            found = min(found, count_loads([step.model for step in order]))
    return found


@settings(deadline=None, max_examples=100)
@given(graphs())
def test_every_step_is_in_one_wave_after_those_that_it_reads(steps: list[NightStep]) -> None:
    check_graph(steps)
    by_name = {step.name: step for step in steps}
    done: set[str] = set()
    loaded = ""
    for wave in plan_waves(steps):
        if wave.model != loaded:
            waiting = [step for step in steps if step.model == loaded and step.name not in done]
            assert not any(done.issuperset(step.after) for step in waiting), "what is ready runs while others wait"
            loaded = wave.model
        for name in wave.steps:
            assert by_name[name].model == wave.model
            assert done.issuperset(by_name[name].after)
        assert done.isdisjoint(wave.steps)
        done.update(wave.steps)
    assert done == by_name.keys()


@settings(deadline=None, max_examples=60)
@given(graphs(most=6))
def test_no_order_loads_models_less_often(steps: list[NightStep]) -> None:
    assert count_loads([wave.model for wave in plan_waves(steps)]) == fewest_loads(steps)


@settings(deadline=None, max_examples=100)
@given(graphs(), st.data())
def test_a_night_over_a_fake_clock(steps: list[NightStep], data: st.DataObject) -> None:
    """Steps take random seconds, some fail, the deadline comes at some time: nothing runs twice, nothing is lost."""
    after = {step.name: step.after for step in steps}
    seconds = {name: data.draw(st.integers(1, 10)) for name in after}
    failing = data.draw(st.sets(st.sampled_from(sorted(after))))
    deadline = data.draw(st.integers(0, sum(seconds.values()) + 1))
    clock, begun, outcomes_at = 0, dict[str, int](), dict[str, Outcome]()

    def answer(wave: Wave) -> dict[str, Outcome]:
        nonlocal clock
        found: dict[str, Outcome] = {}
        for name in wave.steps:
            assert name not in begun, "run twice"
            begun[name] = clock
            assert all(outcomes_at.get(other) == "done" for other in after[name])
            clock += seconds[name]
            found[name] = "failed" if name in failing else "left" if clock > deadline else "done"
        outcomes_at.update(found)
        return found

    outcomes = run_waves(steps, answer, lambda: clock < deadline)
    assert outcomes.keys() == after.keys()
    for name, outcome in outcomes.items():
        before = {outcomes[other] for other in after[name]}
        if before & {"failed", "skipped"}:
            assert outcome == "skipped"
        elif "left" in before:
            assert outcome == "left"
        elif outcome == "left":
            assert name not in begun or clock >= deadline
        else:
            assert name in begun
    if not failing and deadline >= sum(seconds.values()):
        assert set(outcomes.values()) == {"done"}


@settings(deadline=None, max_examples=50)
@given(graphs(), st.data())
def test_a_killed_night_goes_on_with_the_steps_that_are_left(steps: list[NightStep], data: st.DataObject) -> None:
    """A step's rows that are in the tables are not read again, so the second night finds nothing to do in them."""
    num_until_kill = data.draw(st.integers(0, len(steps)))
    answered: list[str] = []

    class KilledError(Exception):
        pass

    def answer(wave: Wave, is_second: bool) -> dict[str, Outcome]:
        for name in wave.steps:
            if not is_second and len(answered) == num_until_kill:
                raise KilledError
            if name not in answered:
                answered.append(name)
        return dict.fromkeys(wave.steps, "done")

    try:
        run_waves(steps, lambda wave: answer(wave, False), lambda: True)
    except KilledError:
        run_waves(steps, lambda wave: answer(wave, True), lambda: True)
    in_one_go: list[str] = [name for wave in plan_waves(steps) for name in wave.steps]
    assert answered == in_one_go


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ({"a": "b", "b": "a"}, "wait for each other: a after b after a"),
        ({"a": "c", "b": "a", "c": "b"}, "wait for each other: a after c after b after a"),
        ({"a": "a"}, "wait for each other: a after a"),
        ({"a": "", "b": "x"}, "'b' comes after 'x', which is none of a, b"),
    ],
)
def test_what_is_no_graph(after: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_graph([NightStep(name=name, model="m", after=(other,) if other else ()) for name, other in after.items()])


def test_a_name_is_used_once() -> None:
    with pytest.raises(ConfigError, match="'a' is there 2 times"):
        check_graph([NightStep(name="a", model="m"), NightStep(name="a", model="n")])
