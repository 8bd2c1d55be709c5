"""README, docs and folder READMEs: their texts, Python blocks and commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("graphs", "runtime", "sampling", "tools", "tests/stub_cuda")
_PATHS = (
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / folder / "README.md" for folder in FOLDERS),
)
DOCUMENTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in _PATHS}


class Block(NamedTuple):
    """A ```python block."""

    document: str
    number: int  # within the document, from 1
    text: str

    def __str__(self) -> str:
        return f"{self.document}-{self.number}"


BLOCKS = [
    Block(document, number, text)
    for document, content in DOCUMENTS.items()
    for number, text in enumerate(re.findall(r"```python\n(.*?)```", content, re.DOTALL), 1)
]
_PLAIN_BLOCKS = [text for content in DOCUMENTS.values() for text in re.findall(r"```(?:sh|console)?\n(.*?)```", content, re.DOTALL)]
COMMANDS = sorted({line.strip() for text in _PLAIN_BLOCKS for line in text.splitlines() if re.match(r"(stepgraph|make|python) ", line)})


def block_with(phrase: str) -> str:
    """The text of the one block that contains the phrase."""
    (found,) = (block.text for block in BLOCKS if phrase in block.text)
    return found
