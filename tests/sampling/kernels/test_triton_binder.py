"""Every Triton program through the binder that Triton generates for its launches on a GPU.

A local variable of the binder replaces an argument of the same name. Triton's interpreter and ahead-of-time compilation use no binder.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.aot_kernels import variants

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

ROOT = Path(__file__).resolve().parent.parent.parent.parent
FOLDERS = ("sampling", "graphs", "runtime", "tools")
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i1": torch.bool,
    "u8": torch.uint8,
}


def find_programs() -> dict[str, Any]:
    """Every function decorated with `triton.jit`, by module and name."""
    found = {}
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        source = path.read_text(encoding="utf-8")
        if "@triton.jit" not in source:
            continue
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        module = importlib.import_module(name if name.startswith("tools.") else f"stepgraph.{name}")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                found[f"{name}.{node.name}"] = getattr(module, node.name)
    return found


PROGRAMS = find_programs()
VARIANTS = variants()


def bind(program: Any, types: Mapping[str, str]) -> None:
    """Call the generated binder with arguments of `types`, and compare what it returns with them."""
    arguments = {name: _argument(kind) for name, kind in types.items()}
    binder = create_function_from_signature(program.signature, program.params, make_backend(GPUTarget("cuda", 90, 32)))
    bound, specialization, options = binder(*arguments.values(), num_warps=4, debug=False)
    assert list(bound) == program.arg_names and all(bound[name] is argument for name, argument in arguments.items())
    assert [kind for kind, _ in specialization] == ["*u1" if kind == "*i1" else kind for kind in types.values()]
    assert options == {"num_warps": 4, "debug": False}


def _argument(kind: str) -> Any:
    if kind.startswith("*"):
        return torch.empty(16, dtype=DTYPES[kind[1:]])
    return {"fp32": 0.5, "constexpr": None}.get(kind, 16)


@pytest.mark.parametrize("name", PROGRAMS)
def test_binder_passes_the_arguments_of_every_program(name: str) -> None:
    """In every variant compiled ahead of time. A function that only other programs call has no variant and is given pointers."""
    program = PROGRAMS[name]
    assert isinstance(program, triton.JITFunction), "unset TRITON_INTERPRET"
    pointers = {param.name: "constexpr" if param.is_constexpr else "*fp32" for param in program.params}
    for types in [variant.signature for variant in VARIANTS if variant.kernel is program] or [pointers]:
        bind(program, types)


def test_search_finds_every_program_compiled_ahead_of_time() -> None:
    assert {id(variant.kernel) for variant in VARIANTS} <= {id(program) for program in PROGRAMS.values()}


def named_as_in_the_binder(logits: Any, params: Any) -> None: ...


def test_argument_named_like_a_local_variable_of_the_binder_fails() -> None:
    with pytest.raises(TypeError, match="failed to specialize argument of type: dict"):
        bind(triton.JITFunction(named_as_in_the_binder), {"logits": "*fp32", "params": "*fp32"})
