"""Mode "generate": texts."""

from collections.abc import Sequence

import pytest

from engine.completion import Completion, FinishReason
from tasks.answers.text import Decoding, TextAnswer
from tasks.workloads.workload import load_workload


@pytest.mark.parametrize(("reason", "text"), [("length", "so kind"), ("eos", "so kind \ufffd")])
def test_a_character_that_is_cut_by_the_length_is_left_out(reason: FinishReason, text: str) -> None:
    completion = Completion(
        request_id="0", finish_reason=reason, token_ids=(5, 6), num_prompt_tokens=3, num_output_tokens=2
    )
    read = load_workload("snippets").kind.read(completion, lambda token_ids: "so kind \ufffd")
    assert read["answer"] == text


@pytest.mark.parametrize("pattern", ["", "so kind"])
@pytest.mark.parametrize(("reason", "text"), [("eos", "so kind"), ("stop", "so kind<|im_end|>")])
def test_the_end_token_is_no_text(pattern: str, reason: FinishReason, text: str) -> None:
    """Not even where the tokenizer does not call it special."""
    words = {5: "so", 6: " kind", 2: "<|im_end|>"}

    def decode(token_ids: Sequence[int]) -> str:
        return "".join(words[token_id] for token_id in token_ids)

    kind = TextAnswer(decoding=Decoding(pattern=pattern), output={"table": "t", "answer_column": "a"})
    completion = Completion(request_id="0", finish_reason=reason, token_ids=(5, 6, 2))
    assert kind.read(completion, decode) == {"answer": text, "token_ids": [5, 6, 2]}
