"""Arguments that are one of a few words."""

from __future__ import annotations

from typing import Any, get_args

__all__ = ["require_choice"]


def require_choice(name: str, value: object, choices: Any) -> None:
    """Refuses an argument that is none of its choices.

    Args:
        name: What the user calls it.
        value: What the user gave.
        choices: The ``Literal`` of its type.

    Raises:
        ValueError: It is another.
    """
    allowed = get_args(choices)
    if value not in allowed:
        *first, last = (f'"{one}"' for one in allowed)
        raise ValueError(f"{name} is {value!r}; it is {', '.join(first)} or {last}.")
