"""The error that ends a benchmark without figures."""


class WrongAnswerError(Exception):
    """The measured program gives a wrong answer, so there are no figures."""
