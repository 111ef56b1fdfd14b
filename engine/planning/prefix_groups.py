"""Prefix groups: the unit of scheduling (BatchLLM section 4.3.1), and how they are rebuilt from stored rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import ArtifactError
from engine.planning.prefix_tree import TokenArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Member:
    """One distinct prompt of a group: computed once, answered for each of its requests.

    Attributes:
        request_indices: positions in the planned input, ascending; several where prompts are identical.
        suffix: int32 ``[num_tokens]``, what follows the group's prefix; never empty.
    """

    request_indices: tuple[int, ...]
    suffix: TokenArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixGroup:
    """Distinct prompts that begin alike. Each member's prompt is prefix + suffix.

    Attributes:
        prefix: int32 ``[num_tokens]``, computed once for all members; empty where a prompt is planned alone.
        members: at least one; at least two where the prefix is not empty and the plan is whole.
    """

    prefix: TokenArray
    members: tuple[Member, ...]

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that the group computes."""
        return len(self.prefix) + sum(len(member.suffix) for member in self.members)


def rebuild_groups(
    prompts: Sequence[TokenArray],
    group_id: npt.ArrayLike,
    member_id: npt.ArrayLike,
    num_prefix_tokens: npt.ArrayLike,
) -> list[PrefixGroup]:
    """The groups of stored plan rows: all of a plan or any part of it, say one partition.

    Args:
        prompts: int32 arrays ``[num_tokens]``, one per row; prefixes and suffixes are views of them.
        group_id, member_id, num_prefix_tokens: integers ``[num_rows]``, rows of a `PlanTable`, in any order.

    Returns:
        groups by ascending group_id, members by ascending member_id; request_indices are positions in ``prompts``.

    Raises:
        ArtifactError: the rows do not fit the prompts or each other; the message names the first such row.
    """
    groups, members, prefix_lens = (np.asarray(column) for column in (group_id, member_id, num_prefix_tokens))
    for name, column in (("group_id", groups), ("member_id", members), ("num_prefix_tokens", prefix_lens)):
        if column.shape != (len(prompts),):
            raise ArtifactError(f"plan column {name} has shape {column.shape}, expected ({len(prompts)},)")
    order = np.lexsort((members, groups)).tolist()  # stable: the rows of a member stay ascending
    first_of_group, first_of_member = -1, -1
    for row in order:
        prompt, prefix_len = prompts[row], int(prefix_lens[row])
        if not 0 <= prefix_len < len(prompt):
            raise ArtifactError(
                f"plan row {row}: num_prefix_tokens is {prefix_len}, expected 0 to {len(prompt) - 1}, "
                f"because the prompt has {len(prompt)} tokens and the last one is never shared"
            )
        if first_of_group < 0 or groups[row] != groups[first_of_group]:
            first_of_group = first_of_member = row
        elif prefix_len != prefix_lens[first_of_group] or not np.array_equal(
            prompt[:prefix_len], prompts[first_of_group][:prefix_len]
        ):
            raise ArtifactError(f"plan rows {first_of_group} and {row}, group {groups[row]}: the prefixes differ")
        elif members[row] != members[first_of_member]:
            first_of_member = row
        elif not np.array_equal(prompt, prompts[first_of_member]):
            raise ArtifactError(
                f"plan rows {first_of_member} and {row}, group {groups[row]}, member {members[row]}: the prompts differ"
            )
    return assemble_groups(prompts, order, groups, members, prefix_lens)


def assemble_groups(
    prompts: Sequence[TokenArray],
    order: Sequence[int],
    group_id: npt.NDArray[np.integer],
    member_id: npt.NDArray[np.integer],
    num_prefix_tokens: npt.NDArray[np.integer],
) -> list[PrefixGroup]:
    """As `rebuild_groups`, for rows known to be consistent; ``order`` lists them by (group_id, member_id)."""
    groups: list[PrefixGroup] = []
    members: list[Member] = []
    request_indices: list[int] = []
    group_ids, member_ids, prefix_lens = group_id.tolist(), member_id.tolist(), num_prefix_tokens.tolist()
    for row, next_row in zip(order, [*order[1:], None], strict=False):
        request_indices.append(row)
        is_last_of_group = next_row is None or group_ids[next_row] != group_ids[row]
        if not is_last_of_group and member_ids[next_row] == member_ids[row]:
            continue
        members.append(Member(request_indices=tuple(request_indices), suffix=prompts[row][prefix_lens[row] :]))
        request_indices = []
        if is_last_of_group:
            groups.append(PrefixGroup(prefix=prompts[row][: prefix_lens[row]], members=tuple(members)))
            members = []
    return groups
