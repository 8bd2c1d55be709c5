"""Device operations. Each is declared once: `operation` decorates its reference in plain torch and derives the rest from the signature.

An operation runs as its reference on the CPU, as the kernel in C where it has one and the library was built, and as a Triton program
on a GPU. All give the same results. It writes into tensors that the caller allocates, so a tape replays it in place.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from stepgraph.sampling import native
from stepgraph.sampling.kernels import triton as programs
from stepgraph.sampling.kernels.c_kernel import FLOATS, PackedCall, Run, pack_argument
from stepgraph.sampling.kernels.signature import ArgumentForm, form_of, schema_of

P = ParamSpec("P")
R = TypeVar("R")
_LIBRARY = torch.library.Library("stepgraph", "FRAGMENT")


def dense(tensor: Tensor) -> Tensor:
    """Elements of the last dimension next to each other."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


# Forms of arguments: the wrapper copies a tensor of another layout, unless the operation writes it. A plain Tensor may have any
# strides. A kernel in C also takes only the types that are named; all arguments with FLOATS then have one type.
Dense = Annotated[Tensor, dense]
Contiguous = Annotated[Tensor, Tensor.contiguous]
DenseFloats = Annotated[Tensor, dense, FLOATS]
ContiguousFloats = Annotated[Tensor, Tensor.contiguous, FLOATS]
Float32s = Annotated[Tensor, Tensor.contiguous, (torch.float32,)]
Ints = Annotated[Tensor, Tensor.contiguous, (torch.int32,)]
Longs = Annotated[Tensor, Tensor.contiguous, (torch.int64,)]
StridedLongs = Annotated[Tensor, None, (torch.int64,)]
Flags = Annotated[Tensor, Tensor.contiguous, (torch.bool,)]


def empty_as(tensor: Tensor, *_: object) -> Tensor:
    """An output with the shape and type of a tensor. As `outputs` of an operation: of its first argument."""
    return tensor.new_empty(tensor.shape)  # empty_like would be followed by a detach, recorded like any operation


def empty_of(shape: Sequence[int], like: Tensor) -> Tensor:
    """An output of another shape."""
    return like.new_empty(shape)


class Operation(Generic[P, R]):
    """A device operation. Calling it allocates the outputs, runs `out` on inputs and outputs, and returns the outputs."""

    def __init__(
        self,
        reference: Callable[P, R],
        outputs: Callable[..., R],
        *,
        name: str = "",
        writes: Sequence[str] = (),
        triton: bool | str | Callable[[torch.device], str] = False,
        c: bool | str = False,
        supports: Callable[..., bool] = lambda: True,
        mapped: bool = False,
        whole: bool = False,
    ) -> None:
        functools.update_wrapper(self, reference)
        parameters, hints = inspect.signature(reference).parameters, typing.get_type_hints(reference, include_extras=True)
        package, _, module = reference.__module__.rpartition(".")
        self.reference, self.mapped, self._whole = reference, mapped, whole
        self.name = name or reference.__name__
        self.c = c if isinstance(c, str) else self.name if c else ""  # kernel name without stepgraph_
        self._supports, self._supports_inputs = supports, [[*parameters].index(name) for name in inspect.signature(supports).parameters]
        # the module of the program, which has the name of the operation
        self.triton = triton if isinstance(triton, str) else f"{package}.triton.{module}" if triton else ""
        self._module_for = triton if callable(triton) else lambda device: "" if programs.why_no_triton(device) else self.triton
        self._outputs = outputs
        self._names = tuple(parameters)
        self._defaults = {name: parameter.default for name, parameter in parameters.items() if parameter.default is not parameter.empty}
        forms = [form_of(hints[name]) for name in parameters]
        self._argument_forms = [(place, form) for place, form in enumerate(forms) if form != ArgumentForm()]
        self._arrange = tuple(None if name in writes else form.arrange for name, form in zip(parameters, forms, strict=True))
        # torch.library.custom_op would add wrappers that cost more than most kernels, and import the compiler at the first call
        _LIBRARY.define(schema_of(self.name, hints, writes))
        _LIBRARY.impl(self.name, self._on_cpu, "CPU")
        _LIBRARY.impl(self.name, self._on_cuda, "CUDA")
        torch.library.register_fake(f"stepgraph::{self.name}", lambda *_: None, lib=_LIBRARY)  # the caller allocates the outputs
        self.out: OpOverload = getattr(torch.ops.stepgraph, self.name).default
        OPERATIONS[f"stepgraph::{self.name}"] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        inputs: tuple[Any, ...] = args if len(args) == len(self._names) else self._complete(args, kwargs)
        if torch.compiler.is_dynamo_compiling() and not _needs_gradient(inputs):  # one operation of the compiled function
            outputs = self._outputs(*inputs)
            self.out(*self._arranged(inputs), *_tensors(outputs))
            return outputs
        in_c = self.c and inputs[0].is_cpu and not native.why_not()
        if not (self.triton or in_c or self._whole) or _needs_gradient(inputs):
            return self.reference(*inputs)  # type: ignore[call-arg]
        if torch.is_inference_mode_enabled() and torch._C._len_torch_dispatch_stack():  # a recorder's replays write the outputs without it
            with torch.inference_mode(False), torch.no_grad():
                return self(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # the dispatcher still calls dispatch modes
            arranged = self._arranged(inputs)
            if self.triton or self._whole or self._fits_c(arranged):
                with torch._C._DisableTorchDispatch():  # a recorder finds the outputs among the arguments
                    outputs = self._outputs(*inputs)
                self.run(*arranged, *_tensors(outputs))
                return outputs
        return self.reference(*inputs)  # type: ignore[call-arg]

    def _arranged(self, inputs: Sequence[Any]) -> list[Any]:
        return [value if how is None or value is None else how(value) for how, value in zip(self._arrange, inputs, strict=True)]

    def run(self, first: Tensor, *others: Any) -> None:
        """`out`, without torch's dispatcher where no dispatch mode has to see the call: it takes longer than the launch of a program."""
        run = self._on_cuda if first.is_cuda and not torch._C._len_torch_dispatch_stack() else self.out
        run(first, *others)

    def prepare(self, *arguments: Any) -> Run | None:
        """A call in C that repeats `out` in the memory of its arguments; None where the reference has to run."""
        function = native.kernel(self.c) if self.c and arguments[0].is_cpu else None
        if function is None or not self._fits_c(arguments[: len(self._names)]):
            return None
        if not all([output.is_contiguous() for output in self.outputs_in(arguments)]):
            return None
        native.use_threads(torch.get_num_threads())
        return PackedCall.of(function, b"".join([pack_argument(value) for value in arguments]), arguments)

    def outputs_in(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """The arguments of `out` that a call allocates."""
        return arguments[len(self._names) :]

    def run_reference(self, *arguments: Any) -> None:
        found = self.reference(*arguments[: len(self._names)])  # type: ignore[call-arg]
        for output, result in zip(self.outputs_in(arguments), _tensors(found), strict=True):
            if result is not None:
                output.copy_(result)

    def _fits_c(self, inputs: Sequence[Any]) -> bool:
        float_type = None  # the type of all arguments with FLOATS
        for index, (arrange, types) in self._argument_forms:
            value = inputs[index]
            if value is None:
                continue
            if (types and value.dtype not in types) or (arrange is not None and arrange(value) is not value):
                return False
            if types is FLOATS:
                float_type = float_type or value.dtype
                if value.dtype is not float_type:
                    return False
        return self.c != "" and self._supports(*[inputs[index] for index in self._supports_inputs])

    def _complete(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        assert kwargs.keys() <= {*self._names}, kwargs.keys() - {*self._names}
        values = {**self._defaults, **dict(zip(self._names, args, strict=False)), **kwargs}
        return tuple(values[name] for name in self._names)

    def _on_cpu(self, *arguments: Any) -> None:
        run = self.prepare(*arguments)
        if run is None:
            return self.run_reference(*arguments)
        run()

    def _on_cuda(self, first: Tensor, *others: Any) -> None:
        module = self._module_for(first.device) if self.triton else ""
        if not module:
            return self.run_reference(first, *others)
        program = getattr(importlib.import_module(module), self.name)
        with torch.cuda.device(first.device):
            program(first, *others)


OPERATIONS: dict[str, Operation[Any, Any]] = {}  # by qualified name


def operation(outputs: Callable[..., R], **settings: Any) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Declare an operation by its reference: a function of tensors and numbers in plain torch, the first argument a tensor.

    outputs: checks the inputs and allocates what the reference returns. writes: inputs that it changes.
    triton: there is a program of the same name in PACKAGE/triton/MODULE.py; or the module that it is in; or a function that gives, for a
    device, that module, empty for the reference.
    c: there is a kernel of the same name in the C library; or its name. supports: whether it supports the inputs that are named as its
    parameters, besides their forms.
    mapped: the device accesses pinned arguments in host memory.
    Without a program and without C for its arguments, a call runs the reference: as one operation if `whole`, otherwise as those of torch.
    """
    return lambda reference: Operation(reference, outputs, **settings)


def _needs_gradient(inputs: Sequence[Any]) -> bool:
    """Whether torch needs a gradient, which only the reference has."""
    return torch.is_grad_enabled() and any([isinstance(value, Tensor) and value.requires_grad for value in inputs])


def _tensors(returned: Any) -> tuple[Tensor | None, ...]:
    return () if returned is None else (returned,) if isinstance(returned, Tensor) else tuple(returned)
