"""Mode "generate": texts."""

import pytest

from engine.completion import Completion, FinishReason
from tasks.workloads.workload import load_workload


@pytest.mark.parametrize(("reason", "text"), [("length", "so kind"), ("eos", "so kind \ufffd")])
def test_a_character_that_is_cut_by_the_length_is_left_out(reason: FinishReason, text: str) -> None:
    completion = Completion(
        request_id="0", finish_reason=reason, token_ids=(5, 6), num_prompt_tokens=3, num_output_tokens=2
    )
    read = load_workload("snippets").kind.read(completion, lambda token_ids: "so kind \ufffd")
    assert read["answer"] == text
