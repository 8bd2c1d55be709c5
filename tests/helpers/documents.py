"""README, docs and folder READMEs: their texts, Python blocks and commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
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


_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FENCES = {document: _FENCED.findall(content) for document, content in DOCUMENTS.items()}
BLOCKS = [
    Block(document, number, text)
    for document, found in _FENCES.items()
    for number, text in enumerate((text for language, text in found if language == "python"), 1)
]
_COMMAND = re.compile(r"(?:stepgraph|make|python) [^`]*")


def _commands() -> Iterator[str]:
    """Lines of blocks in no language, without comments, and code in the prose."""
    for document, content in DOCUMENTS.items():
        lines = [re.split(" +# ", line)[0].strip() for language, text in _FENCES[document] if not language for line in text.splitlines()]
        yield from filter(_COMMAND.fullmatch, [*lines, *re.findall("`([^`\n]*)`", _FENCED.sub("", content))])


COMMANDS = sorted(set(_commands()))


def block_with(phrase: str) -> str:
    """The text of the one block that contains the phrase."""
    (found,) = (block.text for block in BLOCKS if phrase in block.text)
    return found
