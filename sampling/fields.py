"""How a refusal repeats what it was given: whole where that is short, and never failing over it."""

from __future__ import annotations

MOST = 100  # characters


def clip_repr(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # a number of thousands of digits, or an object of the caller's that does not tell
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= MOST else f"{text[:MOST]}..."


def said(error: BaseException) -> str:
    """What a library says of a file, which may repeat all of it."""
    text = str(error)
    return text if len(text) <= 5 * MOST else f"{text[: 5 * MOST]}..."


def called(name: object) -> str:
    """The name of a field that came with a value, as a part of its path."""
    return name[:MOST] if isinstance(name, str) else clip_repr(name)
