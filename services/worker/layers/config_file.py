"""Typed access to config.json, with errors that name the field."""

from __future__ import annotations

from typing import Any

from quire.shared.errors import InvalidArgument


class ConfigFile:
    """Typed, read-only access to a config.json of Hugging Face transformers 4 or 5.

    Getters return the default for missing fields and null, and raise InvalidArgument, naming field and value, for other
    types, or without a default.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    @property
    def values(self) -> dict[str, Any]:
        return self._values

    def has(self, key: str) -> bool:
        """Returns whether the field is present and not null."""
        return self._values.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def without(self, key: str) -> ConfigFile:
        """Returns a copy that lacks the field."""
        return ConfigFile({name: value for name, value in self._values.items() if name != key})

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns the field as an integer. Raises InvalidArgument for other types, booleans included."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise refusal(key, value, "a whole number is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns the field as a float. Raises InvalidArgument for anything but integers and floats."""
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise refusal(key, value, "a number is needed")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Returns the field as a boolean. Raises InvalidArgument for other types."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise refusal(key, value, "true or false is needed")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Returns the field as a string. Raises InvalidArgument for other types."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise refusal(key, value, "a text is needed")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """Returns a list field as floats. Raises InvalidArgument for a missing field and other elements."""
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(one, (int, float)) for one in value):
            raise refusal(key, value, "a list of numbers is needed")
        return tuple(map(float, value))

    def section(self, key: str) -> ConfigFile | None:
        """Returns an object field; None if it is missing or null. Raises InvalidArgument for other types."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise refusal(key, value, "an object is needed")
        return ConfigFile(value)


def refusal(key: str, value: Any, reason: str) -> InvalidArgument:
    return InvalidArgument(f"config.json: {key} is {value!r}: {reason}", field="model")
