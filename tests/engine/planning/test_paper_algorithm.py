"""Method "paper" against BatchLLM's Algorithm 1 as printed: recursive, on nodes that are really forked and merged."""

from dataclasses import dataclass, field
from itertools import groupby, takewhile

from hypothesis import given
from hypothesis import strategies as st

from engine.planning.prefix_groups import plan_prefix_groups

Prompt = tuple[int, ...]


@dataclass(eq=False)
class Node:
    num_tokens: int
    children: list["Node"] = field(default_factory=list)
    prompt: Prompt = ()  # of a leaf

    def prompts(self) -> list[Prompt]:
        return [self.prompt] if self.prompt else [prompt for child in self.children for prompt in child.prompts()]


def compact_tree(prompts: list[Prompt], depth: int) -> Node:
    """Of distinct, sorted prompts with their first ``depth`` tokens in common, which are above the node returned."""
    if len(prompts) == 1:
        return Node(num_tokens=len(prompts[0]) - depth, prompt=prompts[0])
    columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
    shared = len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
    ends = [compact_tree([prompt], shared) for prompt in prompts if len(prompt) == shared + 1]
    longer = groupby((prompt for prompt in prompts if len(prompt) > shared + 1), key=lambda prompt: prompt[shared])
    return Node(num_tokens=shared - depth, children=ends + [compact_tree(list(below), shared) for _, below in longer])


def maximize_reuse(node: Node) -> None:
    for child in list(node.children):
        maximize_reuse(child)
        for grandchild in list(child.children):
            gain = (len(grandchild.prompts()) - 1) * grandchild.num_tokens
            penalty = child.num_tokens
            if gain > penalty:
                child.children.remove(grandchild)
                forked = Node(num_tokens=child.num_tokens + grandchild.num_tokens, children=grandchild.children)
                node.children.append(forked)
        if not child.prompts():
            node.children.remove(child)


@given(
    distinct=st.sets(
        st.lists(st.tuples(st.integers(0, 1), st.integers(1, 5)), min_size=1, max_size=7).map(
            lambda parts: tuple(token for token, length in parts for _ in range(length))
        ),
        max_size=40,
    )
)
def test_paper_is_algorithm_1(distinct: set[Prompt]) -> None:
    # A dummy root above the tree, even where all prompts begin alike.
    root = Node(num_tokens=0, children=[compact_tree(sorted(distinct), 0)] if distinct else [])
    if root.children and root.children[0].num_tokens == 0:
        root = root.children[0]
    maximize_reuse(root)
    expected = set()
    for child in root.children:
        below = child.prompts()
        expected.add((child.num_tokens if len(below) > 1 else 0, frozenset(below)))

    sequences = sorted(distinct)
    planned = {
        (len(group.prefix), frozenset(sequences[member.request_indices[0]] for member in group.members))
        for group in plan_prefix_groups(sequences, method="paper")
    }
    assert planned == expected
