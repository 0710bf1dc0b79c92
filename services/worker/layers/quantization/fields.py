"""Typed access to a `quantization_config`; errors name the field's path and value."""

from __future__ import annotations

from typing import Any, TypeVar

from quire.services.worker.layers.config_file import refusal
from quire.shared.errors import InvalidArgument

SECTION = "quantization_config"
T = TypeVar("T")


class Fields:
    """Typed access to one object of a config.json; errors (InvalidArgument) name the field's path and value."""

    def __init__(self, values: dict[str, Any], path: str = SECTION) -> None:
        self._values, self._path = values, path

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def refusal(self, key: str, value: Any, reason: str) -> InvalidArgument:
        return refusal(f"{self._path}.{key}", value, reason)

    def one_of(self, key: str, known: tuple[T, ...], default: T | None = None) -> T:
        """Returns the field, or the default if it is missing or null. Raises InvalidArgument if it is not in `known`;
        true is not 1."""
        value: T = self.get(key, default)
        if value not in known or isinstance(value, bool) != isinstance(known[0], bool):
            raise self.refusal(key, value, f"supported: {', '.join(map(str, known))}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return self.one_of(key, (True, False), default)

    def integer(self, *keys: str) -> int:
        """Returns the first of `keys` that is present. Raises InvalidArgument if none is or it is no integer."""
        key = next((key for key in keys if self.get(key) is not None), keys[0])
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.refusal(key, value, "a whole number is needed")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """Returns a list of strings, empty if it is missing. Raises InvalidArgument for other values."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.refusal(key, value, "a list of names is needed")
        return tuple(value)

    def section(self, key: str) -> Fields | None:
        """Returns an object field with its path; None if it is missing or null. Raises InvalidArgument for other
        values."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refusal(key, value, "an object is needed")
        return Fields(value, f"{self._path}.{key}")

    def sections(self) -> list[tuple[str, Fields]]:
        """Returns all entries by key, each of which has to be an object; null ones are left out."""
        return [(key, section) for key in self._values if (section := self.section(key)) is not None]

    def reject_fields(self, *keys: str) -> None:
        """Raises InvalidArgument for fields that would change the numbers and are not supported."""
        for key in keys:
            if self.get(key):
                raise self.refusal(key, self.get(key), "it is not supported")
