"""From tokens to partitions: plan rows in bounded memory, and the rows of one partition put together again."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.errors import ArtifactError
from engine.planning.prefix_groups import plan_prefix_groups
from tasks import plan_prefix
from tasks.explain import read_all_rows
from tasks.partitions.failing import read_spread_rows
from tasks.plan_prefix import write_plan
from tasks.storage import prompt_order
from tasks.storage.artifact import ArtifactRef, write_parquet
from tasks.storage.plan_file import read_partition, read_plan_summary
from tasks.storage.schemas import TOKENS_SCHEMA
from tests.sources import make_source


def tokens_file(
    folder: Path, prompts: Sequence[Sequence[int] | None], priorities: Sequence[int] | None = None
) -> ArtifactRef:
    """Rows in several row groups; None is a row with an error."""
    rows = [
        {"row_id": i, "token_ids": list(prompt or ()), "error": None if prompt else "no", "priority": priority}
        for i, (prompt, priority) in enumerate(zip(prompts, priorities or [0] * len(prompts), strict=True))
    ]
    batches = [pa.RecordBatch.from_pylist(rows[i : i + 4], schema=TOKENS_SCHEMA) for i in range(0, len(rows), 4)]
    return write_parquet(folder / "tokens.parquet", TOKENS_SCHEMA, batches)


def random_prompts(num_documents: int = 60, seed: int = 5) -> list[list[int] | None]:
    """An instruction, documents of very different numbers of queries, some prompts twice, some missing; shuffled."""
    rng = np.random.default_rng(seed)
    instruction = rng.integers(0, 90, 20).tolist()
    prompts: list[list[int] | None] = []
    for _ in range(num_documents):
        document = rng.integers(0, 90, int(rng.integers(5, 120))).tolist()
        own = [rng.integers(0, 90, int(rng.integers(1, 30))).tolist() for _ in range(int(rng.integers(1, 12)))]
        prompts += [instruction + document + tokens for tokens in own]
        prompts += [instruction + document + own[0]] * int(rng.integers(0, 3)) + [None]
    return [prompts[i] for i in rng.permutation(len(prompts))]


def test_a_group_that_is_split_has_its_urgent_rows_in_its_first_pieces(tmp_path: Path) -> None:
    """Half of a document's rows are urgent, here and there; they are in the first half of its partitions."""
    document = list(range(100, 200))
    prompts = [[*document, row, *range(20)] for row in range(40)]
    prompts[7] = prompts[8]
    priorities = [row % 2 for row in range(40)]
    plan = write_plan(tokens_file(tmp_path, prompts, priorities), tmp_path / "plan.parquet", "exact", 250, 2)
    summary = read_plan_summary(plan)
    highest, lowest = [], []
    for number in range(summary.num_partitions):
        rows = read_partition(plan, number)
        assert [prompt.tolist() for prompt in rows.prompts] == [prompts[row] for row in rows.row_id.tolist()]
        highest.append(rows.priority.max())
        lowest.append(rows.priority.min())
    assert summary.num_partitions >= 6
    assert highest == sorted(highest, reverse=True)
    assert highest.count(1) in (summary.num_partitions // 2, summary.num_partitions // 2 + 1)
    assert lowest[0] == 0 == highest[-1], "the prompt that an urgent row and another share is urgent"
    assert summary.dispatch_order[0] in range(highest.count(1))


@pytest.mark.parametrize("range_tokens", [plan_prefix.RANGE_TOKENS, 5_000])
def test_groups_of_single_prompts_share_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, range_tokens: int
) -> None:
    """With the method "none" a decoder shares what neighbours begin with; without a block size nothing is shared."""
    monkeypatch.setattr(plan_prefix, "RANGE_TOKENS", range_tokens)
    tokens = tokens_file(tmp_path, random_prompts())
    exact, decoder, encoder = (
        read_plan_summary(write_plan(tokens, tmp_path / f"{method}-{size}", method, 10**9, 1, size)).sharing
        for method, size in (("exact", 16), ("none", 16), ("none", None))
    )
    assert exact.num_best_tokens == decoder.num_best_tokens
    assert exact.num_best_tokens < decoder.num_processed_tokens < encoder.num_processed_tokens
    assert encoder.num_processed_tokens == encoder.num_best_tokens


@pytest.mark.parametrize("limits", [(), (5_000, 600)])
def test_partitions_together_are_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, ...]
) -> None:
    if limits:
        monkeypatch.setattr(plan_prefix, "RANGE_TOKENS", limits[0])
        monkeypatch.setattr(prompt_order, "BUCKET_TOKENS", limits[1])
    prompts = random_prompts()
    priorities = [row % 3 for row in range(len(prompts))]
    plan = write_plan(tokens_file(tmp_path, prompts, priorities), tmp_path / "plan.parquet", "exact", 700, 2)
    summary = read_plan_summary(plan)
    assert summary.num_rows == plan.num_rows == sum(prompt is not None for prompt in prompts)
    assert summary.num_partitions == len(summary.partition_costs) > 9
    seen: list[int] = []
    num_groups = num_tokens = 0
    of_partition = []
    for number in range(summary.num_partitions):
        rows = read_partition(plan, number)
        assert [prompt.tolist() for prompt in rows.prompts] == [prompts[row] for row in rows.row_id.tolist()]
        assert rows.priority.tolist() == [priorities[row] for row in rows.row_id.tolist()]
        assert set(rows.partition.tolist()) == {number}
        groups = rows.groups()
        num_groups += len(groups)
        num_tokens += sum(group.num_tokens for group in groups)
        cost = sum(group.num_tokens + 2 * len(group.members) for group in groups)
        assert cost == summary.partition_costs[number]
        assert rows.num_rows == summary.partition_rows[number]
        assert rows.priority.max() == summary.partition_priorities[number]
        of_partition.append((-rows.priority.max(), -cost, number))
        seen += rows.row_id.tolist()
    assert [number for *_, number in sorted(of_partition)] == list(summary.dispatch_order)
    assert sorted(seen) == [row for row, prompt in enumerate(prompts) if prompt is not None]
    assert (num_groups, num_tokens) == (summary.num_groups, summary.sharing.num_processed_tokens)
    stored = pq.read_table(plan.path).to_pylist()
    places = [(row["partition"], row["group_id"], row["member_id"], row["row_id"]) for row in stored]
    assert places == sorted(places)
    whole = read_all_rows(plan)
    assert [prompt.tolist() for prompt in whole.prompts] == [prompts[row] for row in whole.row_id.tolist()]
    assert np.unique(whole.partition).tolist() == list(range(summary.num_partitions))
    groups, common = whole.groups(), whole.num_common_tokens[whole.group_starts].tolist()
    for before, group, num_common in zip(groups, groups[1:], common[1:], strict=False):
        assert len(group.leading_tokens) >= num_common
        assert before.leading_tokens[:num_common].tolist() == group.leading_tokens[:num_common].tolist()
    assert np.mean(np.array(common) >= 20) > 0.9, "the instruction, but where priorities and ranges begin"


def test_one_range_is_the_plan_of_the_whole_and_many_lose_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt for prompt in random_prompts(num_documents=300) if prompt]
    tokens = tokens_file(tmp_path, prompts)
    one = read_plan_summary(write_plan(tokens, tmp_path / "one.parquet", "exact", 10**9, 2))
    groups = plan_prefix_groups(prompts)
    assert one.sharing.num_processed_tokens == sum(group.num_tokens for group in groups)
    assert one.num_groups == len(groups)
    with monkeypatch.context() as patch:
        patch.setattr(prompt_order, "BUCKET_TOKENS", 5_000)
        stored = read_all_rows(write_plan(tokens, tmp_path / "sorted.parquet", "exact", 10**9, 2))
    assert stored.group_id.tolist() == sorted(stored.group_id.tolist())
    for group in stored.groups():
        row_ids = sorted(stored.row_id.tolist())
        rows = [row_ids[index] for member in group.members for index in member.request_indices]
        expected = groups[int(stored.group_id[stored.row_id.tolist().index(rows[0])])]
        assert rows == [index for member in expected.members for index in member.request_indices]
    monkeypatch.setattr(plan_prefix, "RANGE_TOKENS", 20_000)
    many = read_plan_summary(write_plan(tokens, tmp_path / "many.parquet", "exact", 10**9, 2))
    assert many.sharing.num_logical_tokens == one.sharing.num_logical_tokens > 9 * 20_000
    assert many.sharing.num_best_tokens == one.sharing.num_best_tokens
    loss = one.sharing.token_saving_ratio - many.sharing.token_saving_ratio
    assert 0 <= loss < 0.002


def test_a_group_larger_than_a_partition_is_split(tmp_path: Path) -> None:
    prompts = [[7] * 10 + [i, i] for i in range(50)]
    plan = write_plan(tokens_file(tmp_path, prompts), tmp_path / "plan.parquet", "exact", 60, 3)
    summary = read_plan_summary(plan)
    # 50 members of 2 own tokens and 3 of an answer: 250, in pieces of at most 60 - 10 and a prefix each.
    assert summary.partition_costs == (60, 60, 60, 60, 60)
    assert summary.sharing.num_processed_tokens == 5 * 10 + 50 * 2
    assert summary.num_groups == 5


def test_a_plan_for_a_deadline_has_the_priorities_of_its_rows(tmp_path: Path) -> None:
    """Not the ranks by cost that its groups get."""
    prompts = [[*range(10 * row, 10 * row + 1 + row % 7)] for row in range(40)]
    tokens = tokens_file(tmp_path, prompts, [row % 2 for row in range(40)])
    plan = write_plan(tokens, tmp_path / "plan.parquet", "exact", 20, 2, is_cheapest_first=True)
    summary = read_plan_summary(plan)
    highest = [read_partition(plan, number).priority.max() for number in range(summary.num_partitions)]
    assert list(summary.partition_priorities) == highest
    assert set(highest) == {0, 1}


def test_nothing_to_plan_is_an_empty_plan(tmp_path: Path) -> None:
    plan = write_plan(tokens_file(tmp_path, [None, None]), str(tmp_path / "plan.parquet"), "exact", 20, 2)
    summary = read_plan_summary(plan)
    assert (plan.num_rows, summary.num_partitions, summary.dispatch_order) == (0, 0, ())


def test_rows_are_spread_over_the_plan(tmp_path: Path) -> None:
    prompts = [prompt for prompt in random_prompts() if prompt]
    plan = write_plan(tokens_file(tmp_path, prompts), tmp_path / "plan.parquet", "exact", 700, 2)
    sample = read_spread_rows(plan, 9)
    assert [row.num_rows for row in sample] == [1] * 9
    assert all(row.prompts[0].tolist() == prompts[row.row_id[0]] for row in sample)
    assert all(len(row.groups()) == 1 for row in sample)
    partition_of = {row["row_id"]: row["partition"] for row in pq.read_table(plan.path).to_pylist()}
    assert len({partition_of[int(row.row_id[0])] for row in sample}) == 9
    assert len(read_spread_rows(plan, 10**6)) == len(prompts)


def test_a_partition_is_read_from_whole_files_only(tmp_path: Path) -> None:
    plan = write_plan(
        tokens_file(tmp_path, [[1, 2, 3], [1, 2, 4], [5]]), str(tmp_path / "plan.parquet"), "exact", 100, 1
    )
    assert sorted(read_partition(plan, 0).row_id.tolist()) == [0, 1, 2]
    with pytest.raises(ArtifactError, match="has no partition 1"):
        read_partition(plan, 1)
    path = Path(plan.path)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ArtifactError, match="changed or damaged"):
        read_partition(plan, 0)
    path.unlink()
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_partition(plan, 0)


def test_a_plan_with_partitions_for_another_number_of_engines_is_made_anew(tmp_path: Path) -> None:
    tokens = tokens_file(tmp_path, [[1, 2], [1, 3]])
    for partition_tokens, num_plans in (("auto", 2), (100, 1)):
        source = make_source(tmp_path / f"{partition_tokens}.duckdb", partition_tokens=partition_tokens)
        plans = {plan_prefix.plan_prefix.fn(source, tokens, 1, num_engines).path for num_engines in (1, 8)}
        assert len(plans) == num_plans
