"""What is chosen before a night of several models, and nights over a fake clock that keep to it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.nights.allotment import Allotment, Portion, allot, begin_wave
from tasks.nights.graph import NightStep, Outcome, Wave, run_waves

MODELS = {"a": "small", "b": "large", "c": "large"}
LOADS = {"small": 2.0, "large": 20.0}


@st.composite
def portions(draw: st.DrawFn) -> list[Portion]:
    return [
        Portion(
            step=draw(st.sampled_from("abc")),
            priority=draw(st.integers(0, 3)),
            num_rows=draw(st.integers(1, 20)),
            seconds=draw(st.floats(0.5, 60)),
        )
        for _ in range(draw(st.integers(1, 12)))
    ]


@settings(deadline=None, max_examples=100)
@given(portions(), st.floats(0, 300))
def test_rows_are_chosen_by_priority_then_by_cost(found: list[Portion], seconds_left: float) -> None:
    shares = allot(found, MODELS, LOADS, seconds_left)
    assert sum(share.seconds for share in shares.values()) <= seconds_left + 1e-6
    for name, share in shares.items():
        assert share.num_rows + share.num_left == sum(each.num_rows for each in found if each.step == name)
    needed = sum(each.seconds for each in found) + sum(LOADS[model] for model in {MODELS[each.step] for each in found})
    if needed < seconds_left:
        assert not any(share.num_left for share in shares.values())
    in_line = sorted(found, key=lambda each: (-each.priority, each.cost_class))
    for count in range(len(in_line)):
        for name, share in allot(in_line[:count], MODELS, LOADS, seconds_left).items():
            assert shares[name].num_rows >= share.num_rows, "what comes later takes nothing from what comes first"


@settings(deadline=None, max_examples=100)
@given(portions(), st.integers(1, 300), st.floats(0.3, 3))
def test_a_night_over_a_fake_clock_keeps_time_for_what_comes_first(
    found: list[Portion], deadline: int, factor: float
) -> None:
    """Steps take `factor` times their forecast. However wrong it is, no wave takes what is kept for a later one."""
    steps = [NightStep(name=name, model=model) for name, model in MODELS.items()]
    shares = allot(found, MODELS, LOADS, deadline)
    kept = {name: share.seconds for name, share in shares.items()}
    clock, done, loaded = 0.0, dict.fromkeys(MODELS, 0.0), ""

    def answer(wave: Wave) -> dict[str, Outcome]:
        nonlocal clock, loaded
        end = begin_wave(wave.steps, kept, float(deadline))
        mine = sorted(
            (each for each in found if each.step in wave.steps), key=lambda each: (-each.priority, each.cost_class)
        )
        if wave.model != loaded and mine and clock + LOADS[wave.model] < end:
            clock, loaded = clock + LOADS[wave.model], wave.model
        for portion in mine if wave.model == loaded else ():
            seconds = factor * portion.seconds
            share = min(1.0, max(0.0, end - clock) / seconds)
            clock += share * seconds
            done[portion.step] += share * portion.num_rows
        assert clock <= end + 1e-6 or not mine
        return dict.fromkeys(wave.steps, "left" if clock >= end else "done")

    run_waves(steps, answer, lambda: clock < deadline)
    assert clock <= deadline + 1e-6
    if factor <= 1:
        for model in LOADS:
            names = [name for name in shares if MODELS[name] == model]
            assert sum(done[name] for name in names) >= sum(shares[name].num_rows for name in names) - 1e-6


def test_a_later_wave_with_rows_of_higher_priority_gets_its_time() -> None:
    """The first wave would take all; what it takes for granted is what nobody else has asked for."""
    found = [
        Portion(step="a", priority=0, num_rows=100, seconds=100.0),
        Portion(step="b", priority=5, num_rows=10, seconds=30.0),
        Portion(step="c", priority=0, num_rows=10, seconds=40.0),
    ]
    shares = allot(found, MODELS, LOADS, 102.0)
    assert shares["b"] == Allotment(seconds=50.0, num_rows=10, num_left=0)
    assert shares["a"] == Allotment(seconds=pytest.approx(52.0), num_rows=50, num_left=50)
    assert shares["c"] == Allotment(seconds=0.0, num_rows=0, num_left=10)
    kept = {name: share.seconds for name, share in shares.items()}
    assert begin_wave(["a"], kept, 1000.0) == 950.0
    assert begin_wave(["b", "c"], kept, 1000.0) == 1000.0


def test_a_model_that_cannot_be_loaded_in_time_leaves_it_to_others() -> None:
    found = [
        Portion(step="b", priority=5, num_rows=10, seconds=30.0),
        Portion(step="a", priority=0, num_rows=10, seconds=10.0),
    ]
    shares = allot(found, MODELS, LOADS, 15.0)
    assert shares == {"b": Allotment(num_left=10), "a": Allotment(seconds=12.0, num_rows=10)}
