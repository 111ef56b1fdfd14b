"""Layers by what they see, cut into block tables."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import EngineConfig
from engine.kv.kv_layout import MOST_TABLES, find_layout, first_block, kept_windows


def test_layers_that_alternate_have_two_tables() -> None:
    layout = find_layout((128, 0, 128, 0))
    assert (layout.windows, layout.tables, layout.slots, layout.num_slots) == ((0, 128), (1, 0, 1, 0), (0, 0, 1, 1), 2)


def test_rare_layers_decide_how_many_layers_a_table_has() -> None:
    layout = find_layout(((512,) * 5 + (0,)) * 4)  # as Gemma 3: five windows, then all
    assert layout.num_slots == 4
    assert layout.windows == (0, 512, 512, 512, 512, 512)


@given(st.lists(st.sampled_from([0, 24, 500]), min_size=1, max_size=70))
def test_every_layer_has_a_place_of_its_own(windows: list[int]) -> None:
    layout = find_layout(windows)
    assert len(set(zip(layout.tables, layout.slots, strict=True))) == len(windows)
    assert max(layout.slots) < layout.num_slots
    assert [layout.windows[table] for table in layout.tables] == windows
    num_kinds = len(Counter(windows))
    assert len(layout.windows) <= MOST_TABLES + num_kinds - 1
    if num_kinds == 1:
        assert len(layout.windows) == 1


@pytest.mark.parametrize(("num_computed", "first"), [(0, 0), (8, 0), (9, 0), (10, 0), (12, 1), (13, 1), (16, 2)])
def test_a_block_is_seen_while_the_window_of_the_next_row_reaches_it(num_computed: int, first: int) -> None:
    assert first_block(num_computed, 9, 4) == first  # the next row sees eight tokens before it
    assert first_block(num_computed, 0, 4) == 0


def test_policies_that_need_whole_prompts_keep_all_kv() -> None:
    assert kept_windows((8, 0), EngineConfig()) == (8, 0)
    assert kept_windows((8, 0), EngineConfig(sharing="lru")) == ()
    assert kept_windows((8, 0), EngineConfig(prefill="whole")) == ()
