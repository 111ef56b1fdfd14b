"""Work lists and the twins that run them in torch: float64, no Triton."""

import ast
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.kernels
from benchmarks.kernels.attention_batches import GroupSize, make_batch
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.reference import paged_attention_ref
from engine.kernels.scoring import Scoring
from engine.kernels.triton.cost_model import SHARE_MARGIN, SharePolicy, StepSizes, choose
from engine.kernels.triton.tuned import load_tuned
from engine.kernels.triton.work_list import RowField, TileField, WorkList, build_work_list
from tests.engine.kernels.twins import fused_attention_ref

MEMBERS = st.integers(1, 60).flatmap(lambda own: st.tuples(st.just(own), st.integers(1, own)))
GROUPS = st.lists(
    st.builds(
        lambda prefix_len, members: GroupSize(prefix_len=prefix_len, members=members),
        st.sampled_from((0, 0, 1, 7, 8, 9, 40, 130)),
        st.lists(MEMBERS, min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=4,
)


def plan(
    batch: AttentionBatch, *, policy: SharePolicy = "fused", group_size: int = 3, architecture: str = "interpreter",
    launch: str = "", num_kv_heads: int = 2,
) -> WorkList:  # fmt: skip
    tuned = load_tuned(architecture, element_bits=16, head_dim=64)
    tuned = replace(tuned, launches=tuple(found for found in tuned.launches if launch in ("", found.name)))
    return build_work_list(batch, tuned, group_size=group_size, num_kv_heads=num_kv_heads, policy=policy)


def tokens_of(work_list: WorkList) -> int:
    return int((work_list.tiles[:, TileField.KV_END] - work_list.tiles[:, TileField.KV_BEGIN]).sum())


@settings(max_examples=40, deadline=None)
@given(
    groups=GROUPS,
    block_size=st.sampled_from((8, 16, 24)),
    group_size=st.sampled_from((1, 3, 16)),
    policy=st.sampled_from(("fused", "paged", "relay")),
    architecture=st.sampled_from(("interpreter", "sm_90", "gfx942")),
    limits=st.sampled_from(((0.0, 0), (2.0, 0), (0.0, 13), (1.5, 30))),
)
def test_every_cut_gives_the_same_attention(
    groups: Sequence[GroupSize], block_size: int, group_size: int, policy: SharePolicy, architecture: str,
    limits: tuple[float, int],
) -> None:  # fmt: skip
    batch, num_blocks = make_batch(groups, block_size)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch.num_rows, group_size, 8, dtype=torch.float64, generator=generator)
    caches = [torch.randn(num_blocks, block_size, 1, 8, dtype=torch.float64, generator=generator) for _ in range(2)]
    softcap, window = limits
    options = {"scale": 0.7, "softcap": softcap, "window": window}
    expected = paged_attention_ref(query, *caches, batch, Scoring(**options))
    work_list = plan(batch, policy=policy, group_size=group_size, architecture=architecture)
    torch.testing.assert_close(fused_attention_ref(query, *caches, work_list, **options), expected, rtol=0, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(groups=GROUPS, group_size=st.sampled_from((1, 4, 7)), architecture=st.sampled_from(("interpreter", "sm_90")))
def test_sharing_never_costs_more_than_paged(groups: Sequence[GroupSize], group_size: int, architecture: str) -> None:
    batch, _ = make_batch(groups, 16)
    tuned = load_tuned(architecture, element_bits=16, head_dim=64)
    for launch in tuned.launches:
        device = replace(tuned, launches=(launch,), num_processors=20)
        fused, paged = (
            choose(StepSizes.of(batch), device, group_size=group_size, num_kv_heads=2, policy=policy)
            for policy in ("fused", "paged")
        )
        # The margin leaves alone what sharing would win by less.
        most = paged.step_us * (1 - SHARE_MARGIN) if fused.is_shared.any() else paged.step_us
        assert fused.step_us <= most


def test_reference_equals_torch() -> None:
    batch, num_blocks = make_batch([GroupSize(prefix_len=19, members=[(12, 5)])], 16)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(5, 4, 8, dtype=torch.float64, generator=generator)
    caches = [torch.randn(num_blocks, 16, 2, 8, dtype=torch.float64, generator=generator) for _ in range(2)]
    table = torch.from_numpy(np.concatenate([batch.prefix_block_ids, batch.suffix_block_table])).long()
    keys, values = (torch.cat([c[table[:2]].flatten(0, 1)[:19], c[table[2]][:12]]).transpose(0, 1) for c in caches)
    mask = torch.arange(31) <= torch.arange(26, 31)[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0), attn_mask=mask, scale=0.5
    ).transpose(0, 1)
    torch.testing.assert_close(
        paged_attention_ref(query, *caches, batch, Scoring(scale=0.5)), expected, rtol=0, atol=1e-12
    )


def test_a_prefix_read_once_for_its_members() -> None:
    batch, _ = make_batch([GroupSize(prefix_len=2048, members=[(64, 1)] * 16)], 16)
    shared, paged = (plan(batch, policy=policy, architecture="sm_90", group_size=4, num_kv_heads=8)
                     for policy in ("fused", "paged"))  # fmt: skip
    assert shared.num_prefix_tiles > 0
    assert tokens_of(paged) == 16 * (2048 + 64)
    assert tokens_of(shared) <= 4 * 2048 + 16 * 64


def test_short_prefixes_and_few_members_stay_paged() -> None:
    for groups in ([GroupSize(prefix_len=16, members=[(200, 1)] * 2)], [GroupSize(prefix_len=2048, members=[(64, 1)])]):
        batch, _ = make_batch(groups, 16)
        work_list = plan(batch, architecture="sm_90", group_size=4, num_kv_heads=8)
        assert work_list.num_prefix_tiles == 0
        np.testing.assert_array_equal(
            work_list.tiles, plan(batch, architecture="sm_90", policy="paged", group_size=4, num_kv_heads=8).tiles
        )


def test_long_chunks_go_on_alone_while_the_others_share() -> None:
    batch, _ = make_batch([GroupSize(prefix_len=4096, members=[(64, 1)] * 32 + [(1024, 1024)])], 16)
    work_list = plan(batch, architecture="sm_90", group_size=4, num_kv_heads=8)
    assert work_list.num_prefix_tiles > 0
    shared_rows = work_list.row_ids[batch.num_rows :][:32]  # then the rows of packed tiles
    np.testing.assert_array_equal(shared_rows, np.arange(32))
    is_chunk = np.isin(work_list.row_ids[work_list.tiles[:, TileField.FIRST_ROW_ID]], np.arange(32, batch.num_rows))
    assert work_list.tiles[is_chunk, TileField.IS_WIDE].all()
    assert (work_list.tiles[is_chunk, TileField.KV_BEGIN] == 0).any()


@pytest.mark.parametrize("groups", [
    [GroupSize(prefix_len=0, members=[(8000, 1)])],
    [GroupSize(prefix_len=8000, members=[(5, 1)] * 6)],
])  # fmt: skip
def test_few_long_rows_are_split_over_the_device(groups: Sequence[GroupSize]) -> None:
    batch, _ = make_batch(groups, 16)
    work_list = plan(batch, architecture="sm_90", group_size=4, num_kv_heads=8)
    # 8 KV heads times the tiles of the long range fill a good part of 132 processors, in ranges of 256 tokens or more.
    lengths = work_list.tiles[:, TileField.KV_END] - work_list.tiles[:, TileField.KV_BEGIN]
    assert (lengths > 5).sum() * 8 >= 132
    assert (work_list.rows[:, RowField.NUM_PARTS] >= 17).all()
    assert lengths[lengths > 5].min() >= 200


def test_a_full_device_is_not_split() -> None:
    batch, _ = make_batch([GroupSize(prefix_len=0, members=[(1000, 1)] * 512)], 16)
    work_list = plan(batch, architecture="sm_90", group_size=4, num_kv_heads=8)
    assert work_list.num_partials == 0
    assert len(work_list.tiles) == 512


def test_longest_tiles_start_first() -> None:
    batch, _ = make_batch([GroupSize(prefix_len=0, members=[(n, 1) for n in (10, 900, 30, 400)])], 16)
    costs = plan(batch).tile_us
    assert (np.diff(costs) <= 0).all()


def test_pure_decoding_takes_the_launch_without_wide_tiles() -> None:
    decode, _ = make_batch([GroupSize(prefix_len=0, members=[(300, 1)] * 64)], 16)
    prefill, _ = make_batch([GroupSize(prefix_len=0, members=[(1024, 1024)] * 4)], 16)
    launches = [plan(batch, architecture="sm_90", group_size=4, num_kv_heads=8).launch for batch in (decode, prefill)]
    assert [launch.wide is None for launch in launches] == [True, False]


def test_groups_of_16_read_their_prefix_once_and_short_own_parts_are_packed() -> None:
    """16 requests of 4 query heads a KV head fill one tile of 64 rows; four of their own parts one of 16 rows."""
    batch, _ = make_batch([GroupSize(prefix_len=2048, members=[(60 + i, 1) for i in range(16)])] * 128, 16)
    work_list = plan(batch, architecture="sm_90", group_size=4, num_kv_heads=8)
    assert work_list.launch.name == "grouped"
    assert work_list.launch.programs_per_processor >= 2
    is_packed = work_list.tiles[:, TileField.POSITION_AT] > 0
    prefix, packed = work_list.tiles[~is_packed], work_list.tiles[is_packed]
    assert len(prefix) == work_list.num_prefix_tiles == 128
    assert (prefix[:, TileField.NUM_TOKENS] == 16).all()
    assert ((prefix[:, TileField.KV_END] - prefix[:, TileField.KV_BEGIN]) == 2048).all()
    assert len(packed) == 512
    rows = [work_list.row_ids[first : first + count] for first, count in packed[:, :2]]
    np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(2048))


def test_long_own_parts_and_steps_that_do_not_fill_the_device_are_not_packed() -> None:
    for groups in (
        [GroupSize(prefix_len=0, members=[(64, 1)] * 64)],
        [GroupSize(prefix_len=0, members=[(2000, 1)] * 2048)],
    ):
        batch, _ = make_batch(groups, 16)
        work_list = plan(batch, architecture="sm_90", group_size=4, num_kv_heads=8)
        assert (work_list.tiles[:, TileField.POSITION_AT] == 0).all()


def test_no_python_loop_grows_with_the_step() -> None:
    """A step of 4,096 sequences in 512 groups is planned in the time that a step of a GPU takes."""
    batch, _ = make_batch([GroupSize(prefix_len=1000, members=[(100, 1)] * 8)] * 512, 16)
    plan(batch, architecture="sm_90")
    start = time.process_time()
    plan(batch, architecture="sm_90")
    assert time.process_time() - start < 0.1


def test_references_and_work_lists_import_no_triton() -> None:
    folder = Path(engine.kernels.__file__).parent
    waiting, seen = ["reference", "triton.work_list", "triton.device_work"], set()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        path = folder / module.replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "triton" for name in names), module
            ours = [name.removeprefix("engine.kernels.") for name in names if name.startswith("engine.kernels.")]
            waiting += [name for name in ours if name not in seen]
    assert {"attention_batch", "triton.cost_model", "triton.tuned", "triton.work_list"} <= seen
