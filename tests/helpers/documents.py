"""The READMEs: what they say, and the examples in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
READMES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("*/README.md")))
}
SNIPPETS: list[str] = [found for text in READMES.values() for found in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


def snippet(holds: str) -> str:
    """The one example that holds a text."""
    (found,) = (each for each in SNIPPETS if holds in each)
    return found
