"""What the kinds of answer that are made of a prompt's hidden states have in common."""

from typing import ClassVar, Literal

from tasks.answers.kind import SingleRequest

TooLong = Literal["truncate", "error"]
"""What becomes of a text of more tokens than the model takes: its end is cut off, or its row is an error."""


class PooledKind(SingleRequest):
    """An embedding, or the classes of a classification head; encoders answer no other kinds.

    Attributes:
        too_long: see `TooLong`.
    """

    __slots__ = ()

    is_pooled: ClassVar[bool] = True
    has_chat: ClassVar[bool] = False

    too_long: TooLong

    @property
    def pair_separator(self) -> str:
        """Control tokens that stand between the texts of a pair; empty where there is one text."""
        return ""
