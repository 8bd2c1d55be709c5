"""Values for kernels, which do nothing in the stub libraries: each is computed on the CPU, in the memory of the stub device.

After a launch of torch or of Triton a host function is enqueued on the same stream, in a capture as a node of the graph. It runs the same
operation of torch, or the Triton program in Triton's interpreter, on CPU tensors with the memory of the arguments. So a graph computes
in the order of its nodes, with its host nodes and copies.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from triton.runtime import interpreter, jit

import tests.helpers.fast_interpreter  # noqa: F401
from stepgraph.graphs import errors
from stepgraph.sampling.kernels.operation import OPERATIONS

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
COLLECT = 10_000  # launches
EMPTY = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
_alone = threading.Lock()  # the interpreter patches triton.language, which the launching thread uses to compile
_changes: list[Any] = []  # patches of the interpreter that are in place
errors._SKIPPED_FILES.add(__file__)  # errors name the line that launches
_launch, _compile, _patch, _patch_tensor = (
    jit.JITFunction.run,
    jit.JITFunction._do_compile,
    interpreter._patch_lang,
    interpreter._patch_lang_tensor,
)


def on_host(value: Any) -> Any:
    """A CPU tensor with the memory of a tensor of the device; any other value as it is."""
    if not isinstance(value, Tensor) or not value.is_cuda:
        return value
    nbytes = value.untyped_storage().nbytes()
    if not nbytes:
        return torch.empty(value.shape, dtype=value.dtype)
    memory = (ctypes.c_char * nbytes).from_address(value.untyped_storage().data_ptr())
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), value.shape, value.stride())


def _as_read(value: Any) -> Any:
    """Like on_host, but clones CPU tensors that are not pinned: the call has read them when it returns."""
    if isinstance(value, Tensor) and value.is_cpu and not value.is_pinned():
        return value.clone()
    if isinstance(value, torch.Generator):  # of the device: its state is a seed and an offset
        return torch.Generator().manual_seed(hash(tuple(value.get_state().tolist())) % 2**63)
    return torch.device("cpu") if isinstance(value, torch.device) else on_host(value)


class Numerics(TorchDispatchMode):
    """Computes what is launched in this thread while it is entered. `errors`: of the computations."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []
        self.programs: set[str] = set()  # that were interpreted
        self._work: dict[int, tuple[Callable[[], object], bool]] = {}
        self._numbers = itertools.count(1)
        self._entry = HOST_FUNCTION(self._run)
        self._driver = ctypes.CDLL("libcuda.so.1")

    def _run(self, number: int) -> None:
        work, captured = self._work[number]
        if not captured:
            del self._work[number]
        try:
            work()
        except BaseException as error:
            self.errors.append(error)

    def enqueue(self, work: Callable[[], object]) -> None:
        if self.errors:
            raise self.errors.pop(0)
        number = next(self._numbers)
        self._work[number] = work, torch.cuda.is_current_stream_capturing()
        if not number % COLLECT and not torch.cuda.is_current_stream_capturing():
            gc.collect()
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        assert self._driver.cuLaunchHostFunc(stream, self._entry, ctypes.c_void_p(number)) == 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        operation = OPERATIONS.get(name)
        if operation is not None and args[0].is_cuda:
            with self:
                return operation._on_cuda(*args, **kwargs)
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        device = kwargs.get("device")
        if not any(tensor.is_cuda for tensor in tensors) and (device is None or torch.device(device).type != "cuda"):
            return func(*args, **kwargs)
        if name in EMPTY or func is torch.ops.aten._local_scalar_dense.default:
            return func(*args, **kwargs)
        if _depends_on_values(func, args):
            torch.cuda.current_stream().synchronize()
            return tree_map(_to_device, func(*tree_map(on_host, args), **tree_map(on_host, kwargs)))
        written = [argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments]
        read = [value if written[index] else tree_map(_as_read, value) for index, value in enumerate(args)]
        options = {key: value if key == "out" else tree_map(_as_read, value) for key, value in kwargs.items() if key != "pin_memory"}
        result = func(*args, **kwargs)
        outputs = [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if not any(written) and all(output.untyped_storage().data_ptr() in storages for output in outputs):
            return result  # a view
        read, options = tree_map(on_host, (read, options))
        work = partial(_compute, func, read, options, [on_host(output) for output in outputs])
        if any(output.is_cpu and not output.is_pinned() for output in outputs):
            torch.cuda.current_stream().synchronize()
            work()
        else:
            self.enqueue(work)
        return result

    @contextmanager
    def computing(self) -> Iterator[Numerics]:
        """Enter this mode, and compute launches of Triton too. Raises the first error of a computation.

        Only the launching thread collects garbage: a collection may free CUDA memory, and host functions must not call CUDA.
        """

        def run(program: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            launched = _launch(program, *args, grid=grid, warmup=warmup, **options)
            if not warmup and torch._C._len_torch_dispatch_stack():
                given = tree_map(on_host, args), tree_map(on_host, options)
                self.programs.add(program.fn.__name__)
                self.enqueue(partial(_interpret, program, grid, *given))
            return launched

        jit.JITFunction.run, jit.JITFunction.__call__, jit.JITFunction._do_compile = run, _call, _compile_alone
        interpreter._patch_lang, interpreter._patch_lang_tensor = lambda function: interpreter._LangPatchScope(), _patch_index
        collecting = gc.isenabled()
        gc.disable()
        try:
            with self:
                yield self
        finally:
            torch.cuda.synchronize()
            if collecting:
                gc.enable()
            _restore()
            jit.JITFunction.run, jit.JITFunction._do_compile = _launch, _compile
            interpreter._patch_lang, interpreter._patch_lang_tensor = _patch, _patch_tensor
        if self.errors:
            raise self.errors.pop(0)


def _depends_on_values(func: Any, args: Any) -> bool:
    """Whether the shape of the result, or a result in Python, depends on values of the arguments."""
    name, returned = func._schema.name, [str(each.type) for each in func._schema.returns]
    if name in ("aten::nonzero", "aten::masked_select", "aten::_unique2") or any(kind in ("bool", "int", "float") for kind in returned):
        return True
    return name == "aten::index" and any(index is not None and index.dtype == torch.bool for index in args[1])


def _to_device(value: Any) -> Any:
    return value.to("cuda") if isinstance(value, Tensor) else value


def _compute(func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
    results = [value for value in tree_flatten(func(*args, **kwargs))[0] if isinstance(value, Tensor)]
    for output, result in zip(outputs, results, strict=True):
        if output.data_ptr() != result.data_ptr():
            output.copy_(result)


@cache
def _interpreted(function: Any) -> Any:
    return interpreter.InterpretedFunction(function).rewrite()


def _call(program: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a device function from a program in the interpreter."""
    return _interpreted(program.fn)(*args, **kwargs)


def _patch_index(tensor: Any, scope: Any) -> None:
    """Arguments are arrays of one element, which newer versions of numpy do not convert to int."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _compile_alone(*arguments: Any) -> Any:
    with _alone:
        _restore()
        return _compile(*arguments)


def _restore() -> None:
    while _changes:
        _changes.pop().restore()


class _Launch(interpreter.GridExecutor):  # type: ignore[misc]
    """The arguments are in the memory of the CPU already."""

    def _init_args_hst(self, args: Any, kwargs: Any) -> Any:
        return args, kwargs

    def _restore_args_dev(self, *_: Any) -> None:
        pass


def _interpret(program: Any, grid: Any, args: Any, options: Any) -> None:
    with _alone:
        if not _changes:  # patching takes longer than most programs: patches stay until a program is compiled
            _changes.extend(_patch(function) for function in (tl.standard.cdiv.fn, program.fn))
        if "WIDE" in options and "BITS" not in options:  # the interpreter treats bfloat16 as integers; with BITS, WIDE is for packed scales
            options = {**options, "WIDE": True}
        if "dtype" in options:
            options = {**options, "dtype": tl.float32}
        _Launch(_interpreted(program.fn), program.arg_names, grid)(*args, **options)
