"""Structures, constants and signatures of driver calls against CUDA's header, which Triton includes, using a C compiler."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from stepgraph.graphs.cuda import driver, loop, recorder
from stepgraph.graphs.cuda.driver import KernelParams

STRUCTURES = {
    "CUDA_KERNEL_NODE_PARAMS": KernelParams,
    "CUDA_CONDITIONAL_NODE_PARAMS": loop.ConditionalParams,
    "CUgraphNodeParams": loop.NodeParams,
    "CUDA_MEMSET_NODE_PARAMS": loop.MemsetParams,
}
KINDS = (
    *("KERNEL", "MEMCPY", "MEMSET", "HOST", "GRAPH", "EMPTY", "WAIT_EVENT", "EVENT_RECORD", "EXT_SEMAS_SIGNAL", "EXT_SEMAS_WAIT"),
    *("MEM_ALLOC", "MEM_FREE", "BATCH_MEM_OP", "CONDITIONAL"),
)
NUMBERS = {
    **{f"CU_GRAPH_NODE_TYPE_{name}": index for index, name in enumerate(KINDS)},
    "CU_EVENT_DISABLE_TIMING": driver._NO_TIMING,
    "CUDA_ERROR_NOT_READY": driver._NOT_READY,
    "CU_GRAPH_NODE_TYPE_CONDITIONAL": loop.CONDITIONAL_NODE,
    "CU_GRAPH_COND_TYPE_WHILE": loop.WHILE,
    "CU_GRAPH_COND_ASSIGN_DEFAULT": loop.ASSIGN_DEFAULT,
}


ALSO = {"of": "conditional", "shape": "gridDimX", "kernel_params": "kernelParams"}  # our field: the header's field at the same offset


def header() -> Path:
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None or shutil.which("cc") is None:
        pytest.skip("needs the header that triton brings, and a C compiler")
    return Path(found.origin).parent / "backends" / "nvidia" / "include"


def test_structures_and_constants_match_the_header(tmp_path: Path) -> None:
    """Size and offset of every field, and values of constants."""
    lines, expected = [], []
    for name, structure in STRUCTURES.items():
        lines.append(f"(unsigned long)sizeof({name})")
        expected.append(ctypes.sizeof(structure))
        names = [ALSO.get(field[0], field[0]) for field in structure._fields_]
        lines += [f"(unsigned long)offsetof({name}, {field})" for field in names]
        expected += [getattr(structure, field[0]).offset for field in structure._fields_]
    lines += [f"(unsigned long){name}" for name in NUMBERS]
    expected += list(NUMBERS.values())
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    prints = "".join(f'printf("%lu\\n", {line});' for line in lines)
    source.write_text(f"#include <stddef.h>\n#include <stdio.h>\n#include <cuda.h>\nint main(void) {{ {prints} return 0; }}\n")
    subprocess.run(["cc", "-I", str(header()), str(source), "-o", str(program)], check=True, timeout=60)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True, timeout=60).stdout.split()
    assert [int(number) for number in printed] == expected
    assert len(recorder._NODE_KINDS) == len(KINDS)


@pytest.mark.parametrize("module", [driver, loop])
def test_signatures_match_the_header(module: ModuleType) -> None:
    """Same number and sizes of arguments, in order. A driver has all versions of a call whose arguments changed."""
    text = re.sub(r"\s+", " ", (header() / "cuda.h").read_text(encoding="utf-8"))
    renamed = {real: name for name, real in re.findall(r"#define (cu\w+) (?:__CUDA_API_\w+\()?(cu\w+)\)?", text) if not real.endswith("z")}
    for name, signature in module.SIGNATURES.items():
        prototypes = re.findall(rf"CUresult CUDAAPI {name} ?\(([^;]*?)\);", text)  # an older version has its own name
        if name in renamed:
            prototypes = re.findall(rf"CUresult CUDAAPI {renamed[name]} ?\(([^;]*?)\);", text)[:1]
        assert prototypes, f"{name} is not in the header"
        assert [ctypes.sizeof(kind) for kind in signature] == [_bytes_of(argument) for argument in prototypes[0].split(",")], prototypes[0]


def _bytes_of(argument: str) -> int:
    """Enumerations are 4 bytes, pointers and handles 8."""
    kind = argument.replace("const ", "").strip().rpartition(" ")[0]
    narrow = ("unsigned int", "int", "cuuint32_t", "CUresult")
    return 4 if kind in narrow and "*" not in argument else 8
