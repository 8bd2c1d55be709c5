"""Why something cannot be driven natively here."""

from __future__ import annotations


class Unavailable(Exception):
    """The reason, for people: it is told in a warning and in the capture report."""
