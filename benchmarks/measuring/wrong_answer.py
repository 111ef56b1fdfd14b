"""What ends a benchmark before any figure."""


class WrongAnswerError(Exception):
    """What is measured gives a wrong answer, so there are no figures."""
