"""Checks of the fields of a configuration."""

from collections.abc import Sequence


class Checked:
    """Base of configurations: errors begin with the name of the class."""

    def _fail(self, message: str) -> None:
        raise ValueError(f"{type(self).__name__}: {message}")

    def _check_count(self, name: str, least: int = 1, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self._fail(f"{name} must be an int of at least {least}, got {value!r}")

    def _check_choice(self, name: str, allowed: Sequence[str]) -> None:
        if getattr(self, name) not in allowed:
            self._fail(f"{name} must be one of {', '.join(map(repr, allowed))}, got {getattr(self, name)!r}")
