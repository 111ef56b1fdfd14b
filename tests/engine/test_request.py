"""What a request accepts, and the words in which it refuses the rest."""

import pickle
from fractions import Fraction

import numpy as np
import pytest

from engine import Request
from engine.errors import BatchloomError, RequestError, UnknownParameterError


def test_any_integer_sequence_becomes_int32() -> None:
    for tokens in ([1, 2], (1, 2), np.array([1, 2], dtype=np.int64), range(1, 3)):
        request = Request(request_id="a", token_ids=tokens)
        assert request.token_ids.dtype == np.int32
        assert request.token_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"token_ids": []}, "at least one token"),
        ({"token_ids": [[1]]}, "shape"),
        ({"token_ids": ["x"]}, "integers"),
        ({"token_ids": [1.5]}, "integers"),
        ({"token_ids": [2**40]}, "integers"),
        ({"token_ids": [-1]}, "negative"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"mode": "chat"}, "mode must be"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 10**400}, "temperature is too large: 1000"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"stop": ("",)}, "stop"),
        ({"priority": 1.5}, "priority must be a whole number"),
        ({"max_new_tokens": 3.5}, "max_new_tokens must be a whole number, got 3.5"),
        ({"max_new_tokens": "3"}, "max_new_tokens must be a whole number, got '3'"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"seed": None}, "seed must be a whole number from 0 on, got None"),
        ({"expected_output_tokens": 0}, "expected_output_tokens"),
        ({"expected_output_tokens": 2.5}, "expected_output_tokens"),
        ({"expected_output_tokens": "2"}, "expected_output_tokens"),
        ({"temperature": "warm"}, "temperature must be a number, got 'warm'"),
        ({"top_p": None}, "top_p must be a number, got None"),
        ({"stop": None}, "stop must hold non-empty strings, got \\(None,\\)"),
        ({"stop": 5}, "stop must hold non-empty strings, got \\(5,\\)"),
        ({"mode": "embed", "dimensions": "2"}, "dimensions must be None or a whole number from 1 on, got '2'"),
        ({"mode": "embed", "dimensions": 1.5}, "dimensions must be None or a whole number from 1 on, got 1.5"),
        ({"mode": "embed", "dimensions": 0}, "dimensions must be None or a whole number from 1 on, got 0"),
        ({"mode": "embed", "pair_separator": "a"}, "pair_separator must be None or a whole number from 0 on, got 'a'"),
        ({"top_k": True}, "top_k must be a whole number from 0 on, got True"),
        ({"temperature": True}, "temperature must be a number, got True"),
        ({"temperature": 1j}, "temperature must be a number, got 1j"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"mode": "embed", "normalize": None}, "normalize must be True or False, got None"),
        ({"grammar": "[0-9]+"}, r"grammar must be a Grammar, got '\[0-9\]\+'"),
        ({"thinking": 5}, "thinking must be a Thinking, got 5"),
        ({"token_ids": ["1", "2"]}, "token_ids must be integers, got <U1"),
        ({"token_ids": [1j]}, "token_ids must be integers, got complex128"),
        ({"token_ids": 5}, r"the prompt must hold at least one token, got shape \(\)"),
        (
            {"token_ids": [1, 2**31]},
            "token_ids must be integers that fit int32 and are not negative, got 1 to 2147483648",
        ),
        ({"labels": ((1,), (2,))}, "belong to mode 'score'"),
        ({"mode": "score"}, "two or more"),
        ({"mode": "score", "labels": ((1,), ())}, "non-empty"),
        ({"mode": "score", "labels": ((1,), (1,))}, "differ"),
        ({"mode": "score", "labels": ((1.5,), (2,))}, "labels must be sequences of token ids"),
        ({"mode": "score", "labels": ("yes", "no")}, "labels must be sequences of token ids"),
        ({"mode": "score", "labels": (1, 2)}, "labels must be sequences of token ids"),
    ],
)
def test_a_refusal_names_the_request_and_the_reason(parameters: dict[str, object], reason: str) -> None:
    with pytest.raises(RequestError, match=f"request 'row-7': .*{reason}"):
        Request(**{"request_id": "row-7", "token_ids": [1], **parameters})


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(
        UnknownParameterError, match="request 'row-7': unknown parameter 'temprature'; known: request_id"
    ):
        Request(request_id="row-7", token_ids=[1], temprature=0.5)
    assert issubclass(UnknownParameterError, TypeError)
    assert issubclass(UnknownParameterError, BatchloomError)


def test_numbers_of_any_kind_become_python_s() -> None:
    kinds = {"temperature": np.float32(0.5), "top_p": Fraction(1, 2), "top_k": np.int16(3), "seed": np.uint64(2**63)}
    request = Request(request_id="a", token_ids=[1], **kinds)  # type: ignore[arg-type]
    found = (request.temperature, request.top_p, request.top_k, request.seed)
    assert found == (0.5, 0.5, 3, 2**63)
    assert [type(number) for number in found] == [float, float, int, int]


def test_the_seed_belongs_to_the_answer_only_where_something_is_drawn() -> None:
    greedy = [Request(request_id="a", token_ids=[1], seed=seed) for seed in (0, 1)]
    drawn = [Request(request_id="a", token_ids=[1], seed=seed, temperature=1.0) for seed in (0, 1)]
    assert greedy[0].answer_key == greedy[1].answer_key
    assert drawn[0].answer_key != drawn[1].answer_key


def test_hints_to_the_schedule_do_not_belong_to_the_answer() -> None:
    plain = Request(request_id="a", token_ids=[1], max_new_tokens=5)
    hinted = Request(request_id="b", token_ids=[1], max_new_tokens=5, priority=-3, expected_output_tokens=9)
    assert plain.answer_key == hinted.answer_key


def test_a_request_survives_pickling() -> None:
    request = pickle.loads(pickle.dumps(Request(request_id="a", token_ids=[3], stop="x")))
    assert (request.request_id, request.token_ids.tolist(), request.stop) == ("a", [3], ("x",))
