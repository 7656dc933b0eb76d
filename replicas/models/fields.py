"""Typed access to the keys of a JSON object; every complaint names the key and its value."""

from collections.abc import Mapping
from typing import Any


class Fields:
    """One object of a config file. `where` names it in messages."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def has(self, key: str) -> bool:
        """Whether the key is there with a value: null counts as absent, as in transformers' files."""
        return self.values.get(key) is not None

    def error(self, key: str, wanted: str) -> ValueError:
        return ValueError(f"{key} in {self.where} must be {wanted}, got {self.values.get(key)!r}")

    def _get(self, key: str, default: Any) -> Any:
        if self.has(key):
            return self.values[key]
        if default is None:
            raise ValueError(f"{self.where} lacks the key {key}")
        return default

    def positive(self, key: str, default: int | None = None) -> int:
        """An integer of at least 1; required unless there is a default."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; required unless there is a default."""
        value = self._get(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value != value
            or abs(value) == float("inf")
        ):
            raise self.error(key, "a finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def object(self, key: str) -> "Fields":
        """A nested object; empty when the key is absent."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return Fields(value, f"{key} of {self.where}")

    def layers(self, key: str) -> tuple[int, ...]:
        """A list of layer numbers; empty when absent."""
        value = self._get(key, [])
        if not isinstance(value, list) or any(
            isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in value
        ):
            raise self.error(key, "a list of layer numbers")
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of them; empty when absent."""
        value = self._get(key, [])
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise self.error(key, "a token id or a list of token ids")
        return tuple(ids)
