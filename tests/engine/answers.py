"""When two runs count as having said the same."""

from collections.abc import Mapping

import pytest

from engine import Completion


def assert_alike(answers: Mapping[str, Completion], expected: Mapping[str, Completion]) -> None:
    """Each of these answers is what is expected of its request: the same tokens, and scores that hardly differ."""
    for request_id, answer in answers.items():
        wanted = expected[request_id]
        assert (answer.finish_reason, answer.token_ids) == (wanted.finish_reason, wanted.token_ids)
        assert answer.label_logprobs == pytest.approx(wanted.label_logprobs, abs=1e-5)
