"""The common base of kinds of answer that are computed from a prompt's hidden states."""

from typing import ClassVar, Literal

from tasks.answers.kind import SingleRequest

TooLong = Literal["truncate", "error"]
"""What happens to a text with more tokens than the model takes: its end is cut off, or its row gets an error."""


class PooledKind(SingleRequest):
    """An embedding, or the classes of a classification head; encoders support no other kinds."""

    __slots__ = ()

    is_pooled: ClassVar[bool] = True
    has_chat: ClassVar[bool] = False

    too_long: TooLong

    @property
    def pair_separator(self) -> str:
        """Control tokens between the texts of a pair; empty if there is one text."""
        return ""
