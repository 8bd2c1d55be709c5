"""The structures of tools/checks/driver_calls.py against CUDA's own header, which Triton brings along, and a compiler that reads it."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.checks import driver_calls

STRUCTURES = {
    "CUDA_CONDITIONAL_NODE_PARAMS": driver_calls.ConditionalParams,
    "CUgraphNodeParams": driver_calls.NodeParams,
    "CUDA_MEMSET_NODE_PARAMS": driver_calls.MemsetParams,
}
NUMBERS = {
    "CU_STREAM_WAIT_VALUE_EQ": driver_calls.WAIT_EQUAL,
    "CU_GRAPH_NODE_TYPE_CONDITIONAL": driver_calls.CONDITIONAL_NODE,
    "CU_GRAPH_COND_TYPE_IF": driver_calls.IF,
    "CU_GRAPH_COND_ASSIGN_DEFAULT": driver_calls.ASSIGN_DEFAULT,
}


def header() -> Path:
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None or shutil.which("cc") is None:
        pytest.skip("needs the header that triton brings, and a C compiler")
    return Path(found.origin).parent / "backends" / "nvidia" / "include"


def test_structures_and_numbers_are_those_of_the_header(tmp_path: Path) -> None:
    """Size and place of every field, and what the calls are really named."""
    lines, wanted = [], []
    for name, structure in STRUCTURES.items():
        lines.append(f"(unsigned long)sizeof({name})")
        wanted.append(ctypes.sizeof(structure))
        names = ["conditional" if field[0] == "of" else field[0] for field in structure._fields_]
        lines += [f"(unsigned long)offsetof({name}, {field})" for field in names]
        wanted += [getattr(structure, field).offset for field in names]
    lines += [f"(unsigned long){name}" for name in NUMBERS]
    wanted += list(NUMBERS.values())
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    prints = "".join(f'printf("%lu\\n", {line});' for line in lines)
    source.write_text(f"#include <stddef.h>\n#include <stdio.h>\n#include <cuda.h>\nint main(void) {{ {prints} return 0; }}\n")
    subprocess.run(["cc", "-I", str(header()), str(source), "-o", str(program)], check=True, timeout=60)
    told = subprocess.run([str(program)], check=True, capture_output=True, text=True, timeout=60).stdout.split()
    assert [int(number) for number in told] == wanted
    # a driver has both versions of a call whose arguments changed: ours are the header's
    text = (header() / "cuda.h").read_text(encoding="utf-8")
    for name in driver_calls._SIGNATURES:
        assert name in text
        assert not re.search(rf"#define {name}\s.*\b{name}_v\d", text), f"{name} has a newer version"


def test_a_machine_without_a_driver_is_told_so() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(RuntimeError, match="no NVIDIA driver"):
            driver_calls.DriverCalls()
