"""Imports go one way, `tools, tests -> runtime -> graphs -> sampling`; code that runs on the device does not synchronise."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import stepgraph
from tools.lines import BUDGETS, DECODE_RING, DECODE_RING_BUDGET, Count, over_budget

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("sampling", "graphs", "runtime")  # each may import the previous ones
FOLDERS = (*LAYERS, "tools", "tests")
COMMANDS = ("runtime/commands/", "runtime/cli.py")
DEVICE_FILES = (
    "graphs/attention/paged.py",
    "graphs/attention/row_tables.py",
    "graphs/batch.py",
    "graphs/drafting.py",
    "graphs/proposing.py",
    "graphs/layers/slot_mapping.py",
    "graphs/stages.py",
    "graphs/round.py",
    "runtime/models/llama.py",
    "runtime/models/ngram.py",
    "sampling/bitmask.py",
    "sampling/acceptance.py",
)
PUBLIC_NAMES = frozenset(f"stepgraph.{name}" for name in stepgraph.__all__)  # exported by the root, from runtime
SYNCING_METHODS = frozenset({"item", "tolist", "cpu", "nonzero", "numpy"})


def sources(root: Path) -> Iterator[tuple[str, Path]]:
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root).as_posix(), path


@functools.cache
def imported(path: Path) -> list[tuple[int, str]]:
    return list(_imported(ast.parse(path.read_text(encoding="utf-8"))))


def _imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    statements: list[Any] = [tree]  # only statements: expressions contain no imports, and most nodes are expressions
    for node in statements:  # grows
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            statements += getattr(node, name, ())
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def above(layer: str) -> list[list[str]]:
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    return [["stepgraph", folder] for folder in FOLDERS if folder not in allowed]


def import_faults(root: Path) -> list[str]:
    faults = []
    for path, file in sources(root):
        layer = path.split("/")[0]
        for line, name in imported(file):
            parts = name.split(".")
            if name.startswith("."):
                faults.append(f"{path}:{line}: relative import {name}")
            elif parts[0] in LAYERS:
                faults.append(f"{path}:{line}: {name} without the prefix stepgraph imports a second copy of the module")
            elif layer == "runtime" and parts[1:3] == ["runtime", "commands"] and not path.startswith(COMMANDS):
                faults.append(f"{path}:{line}: the library imports {name} of the commands")
            elif layer in LAYERS and (parts[0] in ("tools", "tests") or parts[:2] in above(layer)):
                faults.append(f"{path}:{line}: {layer} imports {name}")
            if layer in ("sampling", "graphs") and name in PUBLIC_NAMES:
                faults.append(f"{path}:{line}: {layer} imports {name}")
    return faults


def sync_faults(path: str, tree: ast.Module) -> list[str]:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    faults = []
    for function in calls:
        if not isinstance(function, ast.Attribute):
            continue
        builds_tensor = function.attr == "tensor" and isinstance(function.value, ast.Name) and function.value.id == "torch"
        if builds_tensor or function.attr in SYNCING_METHODS:
            faults.append(f"{path}:{function.lineno}: .{function.attr}( waits for the device or copies from the host")
    return faults


def test_imports_point_one_way() -> None:
    assert import_faults(ROOT) == []


def test_every_folder_is_checked() -> None:
    assert {path.split("/")[0] for path, _ in sources(ROOT)} == set(FOLDERS)


@pytest.mark.parametrize("path", DEVICE_FILES)
def test_device_files_do_not_synchronise(path: str) -> None:
    assert sync_faults(path, ast.parse((ROOT / path).read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("path", "line", "allowed"),
    [
        ("sampling/a.py", "from stepgraph.graphs.buffers import StaticBuffers", False),
        ("sampling/grammar/a.py", "import stepgraph.runtime.engine", False),
        ("graphs/a.py", "from stepgraph import runtime", False),
        ("graphs/a.py", "def late() -> None:\n    from stepgraph import Engine", False),
        ("graphs/a.py", "from tests.oracles import greedy", False),
        ("runtime/a.py", "from graphs.buffers import StaticBuffers", False),
        ("tests/test_a.py", "import sampling", False),
        ("runtime/a.py", "from .engine import Engine", False),
        ("runtime/models/a.py", "from stepgraph.runtime.commands import terminal", False),
        ("runtime/commands/a.py", "from stepgraph.runtime.commands import terminal", True),
        ("runtime/a.py", "from stepgraph.graphs.buffers import StaticBuffers", True),
        ("graphs/a.py", "from stepgraph.sampling.params import SamplingParams", True),
        ("sampling/a.py", "from stepgraph.sampling import params\nfrom stepgraph import __version__", True),
        ("tools/a.py", "from stepgraph import Engine", True),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, path: str, line: str, allowed: bool) -> None:
    target = tmp_path / path
    target.parent.mkdir(parents=True)
    target.write_text(line + "\n", encoding="utf-8")
    assert (import_faults(tmp_path) == []) == allowed


@pytest.mark.parametrize(
    "call", ["x.item()", "x.sum().tolist()", "x.cpu()", "x.nonzero()", "x.numpy()", "torch.tensor([1])", "torch.nonzero(x)"]
)
def test_a_planted_synchronisation_is_found(call: str) -> None:
    assert len(sync_faults("a.py", ast.parse(f"def stage(x):\n    return {call}"))) == 1
    assert sync_faults("a.py", ast.parse("def stage(x):\n    return torch.where(x, x.to(torch.int64), 0)")) == []


def import_graph(root: Path) -> dict[str, set[str]]:
    """Modules of the core and the core modules that each imports anywhere, also inside functions and under TYPE_CHECKING."""
    files = {path: file for path, file in sources(root) if path.split("/")[0] in LAYERS}
    names = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in files}
    graph: dict[str, set[str]] = {}
    for module, path in names.items():
        found = (name.removeprefix("stepgraph.") for _, name in imported(files[path]) if name.startswith("stepgraph."))
        targets = {name if name in names else name.rpartition(".")[0] for name in found}
        graph[module] = {target for target in targets if target in names and target != module}
    return graph


def test_no_import_cycles() -> None:
    graph = import_graph(ROOT)
    assert len(graph) > 100
    TopologicalSorter(graph).prepare()


def test_a_planted_import_cycle_is_found(tmp_path: Path) -> None:
    files = {
        "graphs/a.py": "from stepgraph.graphs.b import x",
        "graphs/b.py": "def late():\n    from stepgraph.graphs import c",
        "graphs/c.py": "if TYPE_CHECKING:\n    import stepgraph.graphs.a",
        "graphs/d.py": "from stepgraph.graphs.a import x",
        "graphs/__init__.py": "from stepgraph.graphs.d import x",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    with pytest.raises(CycleError) as found:
        TopologicalSorter(import_graph(tmp_path)).prepare()
    assert set(found.value.args[1]) == {"graphs.a", "graphs.b", "graphs.c"}


def long_lines(root: Path, limit: int) -> list[str]:
    """The lines of C and C++ sources that are longer."""
    paths = [path for suffix in ("c", "h", "cpp") for folder in BUDGETS for path in sorted((root / folder).rglob(f"*.{suffix}"))]
    lines = [(path, number, line) for path in paths for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)]
    return [f"{path.relative_to(root)}:{number}" for path, number, line in lines if len(line) > limit]


def test_lines_in_c_have_the_length_that_ruff_checks_in_python(tmp_path: Path) -> None:
    limit = re.search(r"^line-length = (\d+)$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert limit is not None and long_lines(ROOT, int(limit[1])) == []
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs" / "planted.c").write_text(f"int short;\nint {'a' * int(limit[1])};\n", encoding="utf-8")
    assert long_lines(tmp_path, int(limit[1])) == ["graphs/planted.c:2"]


def test_a_total_over_budget_is_reported() -> None:
    exact = {f"{folder}/a.py": budget for folder, budget in BUDGETS.items()}
    ring = dict.fromkeys(DECODE_RING, 0)
    assert over_budget(Count(exact | ring).totals) == []
    for folder, budget in BUDGETS.items():
        found = over_budget(Count(exact | ring | {f"{folder}/b.py": 1}).totals)
        assert found == [f"{folder}: {budget + 1} lines, budget {budget}"]
    large = ring | {DECODE_RING[0]: DECODE_RING_BUDGET + 1}
    assert f"decode ring: {DECODE_RING_BUDGET + 1} lines, budget {DECODE_RING_BUDGET}" in over_budget(Count(large).totals)
