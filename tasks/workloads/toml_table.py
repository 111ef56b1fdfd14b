"""Reading a TOML table key by key, so that what nobody asked for is found."""

from collections.abc import Mapping
from typing import Any, NoReturn

from engine.errors import WorkloadError


class TomlTable:
    """A TOML table that is emptied as it is read; what is left over is an unknown key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = dict(values)
        self.where = where

    def refuse(self, key: str, why: str) -> NoReturn:
        raise WorkloadError(f"{self.where}: {key} {why}")

    def refuse_rest(self) -> None:
        for key in self.values:
            self.refuse(repr(key), "is not a known key here")

    def take(self, key: str, kinds: tuple[type, ...], expected: str, default: Any = None) -> Any:
        """The value of `key`, or `default`; without a default the key must be there."""
        if key not in self.values:
            if default is None:
                self.refuse(key, f"is missing; expected {expected}")
            return default
        value = self.values.pop(key)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            self.refuse(key, f"must be {expected}, got {value!r}")
        return value

    def table(self, key: str, *, optional: bool = False) -> "TomlTable":
        return TomlTable(self.take(key, (dict,), "a table", {} if optional else None), f"{self.where}: [{key}]")

    def text(self, key: str, default: str | None = None) -> str:
        value: str = self.take(key, (str,), "a string", default)
        if default is None and not value.strip():
            self.refuse(key, "must not be empty")
        return value

    def texts(self, key: str, *, optional: bool = False) -> tuple[str, ...]:
        values = self.take(key, (list,), "a list of strings", [] if optional else None)
        if not all(isinstance(value, str) and value for value in values):
            self.refuse(key, f"must be a list of non-empty strings, got {values!r}")
        return tuple(values)

    def identifier(self, key: str) -> str:
        return self.check_identifier(key, self.text(key))

    def identifiers(self, key: str) -> tuple[str, ...]:
        names = tuple(self.check_identifier(key, name) for name in self.texts(key))
        if not names or len({name.lower() for name in names}) < len(names):
            self.refuse(key, f"must name one or more different columns, got {list(names)!r}")
        return names

    def check_identifier(self, key: str, name: str) -> str:
        if not name.isprintable() or len(name) > 128:
            self.refuse(key, f"must be a printable name of at most 128 characters, got {name!r}")
        return name

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.take(key, (bool,), "true or false", default))

    def whole(self, key: str, default: int) -> int:
        return int(self.take(key, (int,), "a whole number", default))

    def number(self, key: str, default: float) -> float:
        return float(self.take(key, (int, float), "a number", default))
