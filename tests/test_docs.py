"""README and docs: every Python block runs on its own, every command is accepted, every link and test name exists."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgraph.graphs import BufferSpec, CaptureError, StaticBuffers, capture
from stepgraph.runtime import cli
from tests.helpers.documents import BLOCKS, COMMANDS, DOCUMENTS, ROOT, Block

OUTPUTS = {  # pattern of the printed text, by a phrase of the block
    "ToyDraft(target, agreement=0.8)": r"b'\{\"ok\": (true|false)\}' constraint_complete\n$",
    "class Recurrent": r"b'[a-z]{3,12}'\n$",
    "buffers.x.copy_(torch.tensor([0.0": r"tensor\(\[0\.00\d\d, 0\.0\d+, 0\.1\d+, 0\.8\d+\]\)\n$",
    "def add_one": r"tensor\(\[ 1\.,  4\.,  7\., 10\.\]\)\n$",
    "20\\d\\d-[01]\\d": r"b'20\d\d-[01]\d' (stop|constraint_complete)\n$",
    "AsyncEngine(engine)": r"b'",
    "engine.trace": r"target_verify",
}


class ParsedError(Exception):
    """The flags were accepted; the tool must not run."""


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_python_block_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if "save_picture" in block.text:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    exec(compile(block.text, str(block), "exec"), {"__name__": "documentation"})
    expected = [pattern for phrase, pattern in OUTPUTS.items() if phrase in block.text]
    assert expected, "no expected output is listed for this block"
    printed = capsys.readouterr().out
    assert all(re.search(pattern, printed) for pattern in expected), printed


def test_readme_example_is_short() -> None:
    (block,) = (block for block in BLOCKS if block.document == "README.md")
    assert len([line for line in block.text.splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_accepted(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make targets exist, flags of commands and tools parse. The examples of every --help run in other tests."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert words[1] in targets
    elif words[0] == "stepgraph":
        cli.make_parser().parse_args(words[1:])
    else:
        parse_tool_flags(words[1:], monkeypatch)


def parse_tool_flags(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a tool up to the point where its flags are parsed."""
    if words[0] == "bundle/install.py":  # a copy that tools/gpu_pack.py makes
        words[0] = "tools/gpu/packing/unpack.py"
    path = ROOT / words[0] if words[0] != "-m" else ROOT / words[1].replace(".", "/") / "__main__.py"
    flags = words[1:] if words[0] != "-m" else words[2:]
    parse = argparse.ArgumentParser.parse_args

    def parsed(*given: Any) -> None:
        parse(*given)
        raise ParsedError

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [str(path), *flags])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    with pytest.raises(ParsedError):
        runpy.run_path(str(path), run_name="__main__")


def test_error_shown_in_the_documentation_is_raised() -> None:
    buffers = StaticBuffers([BufferSpec("x", (4,), torch.float32)])

    def step(buffers: StaticBuffers) -> None:
        buffers.x.mul_(buffers.x.max().item())

    with pytest.raises(CaptureError) as caught:
        capture(step, buffers, backend="tape")
    found = re.search(r"CaptureError: \[([\w-]+)\] (.*)", DOCUMENTS["docs/capture.md"])
    assert found is not None
    assert caught.value.rule == found[1]
    assert found[2] in str(caught.value)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_linked_files_and_named_tests_exist(document: str) -> None:
    text = DOCUMENTS[document]
    for name in re.findall(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)", text):
        assert (ROOT / "tests" / name).exists(), name
    for path, anchor in re.findall(r"\]\(([\w/.-]*)(?:#([\w-]+))?\)", text):
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), path
        headings = re.findall(r"(?m)^#+ (.*)$", target.read_text(encoding="utf-8")) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], (
            f"{path}#{anchor}"
        )


def test_blocks_do_not_import_private_names() -> None:
    for block in BLOCKS:
        assert not re.search(r"import _|\._[a-z]", block.text.replace("self._", "")), block


def test_public_names_are_importable_from_the_package_root() -> None:
    assert "torch" in sys.modules
    import stepgraph

    values: list[Any] = [getattr(stepgraph, name) for name in stepgraph.__all__]
    assert all(value is not None for value in values)
