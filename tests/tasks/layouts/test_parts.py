"""Which parts of a template may change places, and what stays where it is."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.layouts.parts import arrange_workload, split_prompt, split_template
from tasks.workloads.workload import load_workload

WORDS = st.sampled_from(["a", "b c", "{{x}}", "one: two", "#", "<y", ""])
LABELS = ["Document:", "# Query", "<facts>", "Kind of {{thing}}:", "Notes on it:"]


@st.composite
def templates(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A template and the parts that it is made of."""
    parts = []
    for number, label in enumerate(draw(st.permutations([*LABELS[:3], LABELS[4]]))):
        lines = [label + " " * label.endswith(":") + "{" + f"f{number}" + "}" + draw(WORDS)]
        lines += draw(st.lists(st.sampled_from(["more {extra}", "\nno label here {extra}", "and so on"]), max_size=2))
        parts.append("\n".join(lines).rstrip())
    parts[-1] += "\n{last}"
    between = draw(st.lists(st.sampled_from(["\n\n", "\n \n", "\n\n\n"]), min_size=3, max_size=3))
    head = draw(st.sampled_from(["", "Read this.\n\n", "Read {{this}}.\nAnd {that}.\n\n"]))
    tail = draw(st.sampled_from(["", "\nAnswer:", "\n\nTask: answer with a word."]))
    body = "".join(part + separator for part, separator in zip(parts, [*between, ""], strict=True))
    return head + body + tail, parts


@given(templates(), st.data())
def test_every_order_has_the_same_parts_between_the_same_ends(
    template: tuple[str, list[str]], data: st.DataObject
) -> None:
    text, expected = template
    parts = split_template(text)
    assert parts.arrange(parts.written) == text
    assert list(parts.parts) == expected
    order = data.draw(st.permutations(parts.written))
    arranged = parts.arrange(tuple(order))
    assert len(arranged) == len(text)
    assert arranged.startswith(parts.head)
    assert arranged.endswith(parts.tail)
    rest = arranged[len(parts.head) : len(arranged) - len(parts.tail)]
    for place, number in enumerate(order):
        assert rest.startswith(expected[number])
        rest = rest[len(expected[number]) :]
        if place < len(parts.separators):
            rest = rest.removeprefix(parts.separators[place])
    assert rest == ""


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{body} -- {question}", "fewer than two parts"),
        ("Document: {body}\nQuestion: {question}", "fewer than two parts"),
        ("Message: Send it back.\nTopic: billing\n\nMessage: {text}\nTopic:", "occurs twice"),
        ("\n\n".join(f"Part {number}: {{f{number}}}" for number in range(6)), "6 parts, more than 5"),
    ],
)
def test_what_cannot_be_permuted_says_why(template: str, why: str) -> None:
    parts = split_template(template)
    assert why in parts.fixed_because
    assert parts.arrange(parts.written) == template


def test_the_words_behind_the_last_field_stay_last() -> None:
    snippets = load_workload("snippets")
    parts = split_prompt(snippets)
    assert parts.labels == ("Document", "Question")
    arranged = arrange_workload(snippets, (1, 0)).prompt.template
    assert arranged.startswith("Question: {query_text}\n\nDocument: {title}\n\n{body}\nAnswer the question")
    assert split_prompt(load_workload("ranking")).labels == ("Query", "Document")


def test_an_order_is_part_of_the_content_key_and_auto_is_not() -> None:
    snippets = load_workload("snippets")
    digests = {arrange_workload(snippets, order).digest for order in permutations((0, 1))}
    assert len(digests) == 2
    assert snippets.digest in digests
