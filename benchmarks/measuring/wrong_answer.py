"""The error that ends a benchmark without figures."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

Arguments = ParamSpec("Arguments")


class WrongAnswerError(Exception):
    """The measured program gives a wrong answer, so there are no figures."""


def refuse_wrong_answers(main: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """Let a benchmark's `main` end with a line and exit code 1 if it raises `WrongAnswerError`."""

    @wraps(main)
    def refusing(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except WrongAnswerError as error:
            print(f"no figures: {error}", file=sys.stderr)
            return 1

    return refusing
