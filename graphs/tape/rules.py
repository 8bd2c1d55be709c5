"""Finds, while the tape records, what a CUDA stream capture would refuse, or accept and replay wrongly.

`check_function` checks Python calls that do not become an operation (`.tolist()`, `.data_ptr()`), `check_operation` every aten
operation with its tensors. Both raise CaptureError with the line of the step.
"""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers, storage_key
from stepgraph.graphs.errors import Site, fail
from stepgraph.graphs.tape.arena import Arena
from stepgraph.graphs.tape.replay_ops import OpCall, tensors_in

MemoryKind = Literal["device", "pinned", "constant", "intermediate", "literal", "foreign", "unknown"]

_SYNCS: dict[Any, str] = {
    getattr(Tensor, name): name
    for name in (
        "item", "tolist", "cpu", "numpy", "is_nonzero", "__array__", "__bool__", "__int__", "__float__", "__complex__",
        "__index__", "__contains__", "__repr__", "__format__", "__reduce_ex__", "apply_", "map_", "map2_",
    )
} | {torch.equal: "torch.equal", torch.allclose: "torch.allclose", torch.is_nonzero: "torch.is_nonzero"}  # fmt: skip
_POINTERS: dict[Any, str] = {getattr(Tensor, name): name for name in ("data_ptr", "storage", "untyped_storage", "__dlpack__")} | {
    Tensor.__cuda_array_interface__.__get__: "__cuda_array_interface__"
}
_FACTORIES = {
    getattr(torch, name)
    for name in (
        "zeros", "ones", "full", "empty", "empty_strided", "arange", "linspace", "logspace", "eye", "rand", "randn", "randint",
        "randperm", "tril_indices", "triu_indices",
    )
}  # fmt: skip
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_CHECKED = {*_SYNCS, *_POINTERS, *_FACTORIES, Tensor.to, torch.tensor_split, Tensor.tensor_split, _SET_DATA}
_SYNCING_OPS = {
    "aten::_linalg_check_errors": "reads an error code on the host; use the variant of the function that ends in _ex",
    "aten::linalg_matrix_exp": "copies coefficients from pageable memory",
    "aten::cholesky": "reads an error code on the host; use torch.linalg.cholesky_ex",
    **dict.fromkeys(
        ("aten::_linalg_svd", "aten::_linalg_eigh", "aten::linalg_eig", "aten::linalg_lstsq", "aten::linalg_pinv"),
        "synchronises with the device",
    ),
}
# By the arguments of a call.
_SYNCING_CALLS: dict[str, tuple[Callable[[Mapping[str, Any]], bool], str]] = {
    "aten::histc": (lambda values: values["min"] == values["max"], "reads the least and the largest value on the host; pass min= and max="),
    "aten::segment_reduce": (lambda values: not values["unsafe"], "checks the lengths on the host; pass unsafe=True"),
    "aten::fake_quantize_per_channel_affine_cachemask": (
        lambda values: not values["zero_point"].is_floating_point(),
        "checks whole zero points on the host; pass them in float32",
    ),
}
# Arguments that these read on the host where they are tensors, and what to use instead.
_HOST_ARGUMENTS = {
    "aten::normal": ("std", "scale and shift randn"),
    "aten::searchsorted": ("sorter", "sorted values"),
    **{f"aten::{name}": ("value", "a number, or torch.where") for name in ("masked_fill", "masked_fill_", "index_fill", "index_fill_")},
    **{f"aten::{name}": ("start end", "arithmetic on torch.arange") for name in ("linspace", "logspace")},
}
_COLLECTIVES = ("c10d::", "_c10d_functional::")
_SAME_MEMORY = {f"aten::{name}_" for name in ("as_strided", "squeeze", "t", "transpose", "unsqueeze")}  # change a tensor's shape in place
_INDEX_PUT = {"aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index_put", "aten::_unsafe_index_put_"}


def generator_key(generator: torch.Generator) -> int:
    return int(generator._cdata)  # type: ignore[attr-defined]  # Python wrappers of one generator differ


class Memory:
    """Classifies the memory of tensors in one capture."""

    def __init__(self, buffers: StaticBuffers, is_foreign: Callable[[int], bool], arena: Arena | None) -> None:
        self.buffers = buffers
        # storages created in this capture, kept alive so that keys stay unique; with number, operation and line
        self.intermediates: dict[int, tuple[Tensor, int, str, Site]] = {}
        self.literals: dict[int, Tensor] = {}  # 0-d tensors that torch creates from a Python scalar, as in x[0] = 5
        self.arena, self._is_foreign = arena, is_foreign

    def has(self, value: object) -> bool:
        """Whether this is a tensor of a buffer, a constant, or created in this capture."""
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return False
        return storage_key(value) in self.intermediates or self.buffers.owner_of(value) is not None

    def kind(self, tensor: Tensor) -> MemoryKind:
        key = storage_key(tensor)
        if key in self.intermediates:
            return "intermediate"
        owner = self.buffers.owner_of(tensor)
        if owner is not None:
            return owner[1]
        if key in self.literals:
            return "literal"
        return "foreign" if self._is_foreign(key) else "unknown"

    def is_buffer(self, tensor: Tensor) -> bool:
        """Whether this is the tensor of a buffer, and not a view that the step has made."""
        owner = self.buffers.owner_of(tensor)
        return owner is not None and owner[1] != "constant" and self.buffers[owner[0]] is tensor

    def name(self, tensor: Tensor) -> str:
        owner = self.buffers.owner_of(tensor)
        if owner is not None:
            return repr(owner[0])
        result = self.intermediates.get(storage_key(tensor))
        return "an unregistered tensor" if result is None else "the result {} of {} ({})".format(*result[1:])


def has_rule(func: Callable[..., Any]) -> bool:
    """Whether `Rules.check_function` has a rule for this function."""
    try:
        return func in _CHECKED
    except TypeError:  # unhashable
        return False


class Rules:
    def __init__(self, memory: Memory, generators: Sequence[torch.Generator]) -> None:
        self.memory = memory
        # A graph registers the default generator of its device by itself.
        self.generators = {generator_key(generator): generator for generator in (*generators, torch.default_generator)}
        self._default_dtype = torch.get_default_dtype()
        self.scalar_store = False  # inside x[...] = number, for which torch creates a 0-d tensor
        self.function = ""  # the name of the function of torch that the step calls

    def check_function(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check a call at the Python level that has a rule, for calls that do not reach the dispatcher."""
        sync, pointer = _SYNCS.get(func), _POINTERS.get(func)
        if sync is not None:
            raise fail("host-sync", f"{sync} copies a tensor's value to the host, which blocks until the device is done")
        if pointer is not None and not _called_by_buffers():
            raise fail("raw-pointer", f"{pointer} lets memory escape the recording; wrap the kernel in torch.library.custom_op")
        if func is Tensor.to:
            self._check_to(args, kwargs)
        if func in (torch.tensor_split, Tensor.tensor_split) and len(tensors_in([args, kwargs])) > 1:
            raise fail("host-sync", "tensor_split reads a tensor of indices on the host; give it integers")
        if func in _FACTORIES and kwargs.get("out") is None:
            _check_factory(func, kwargs)
        if func == _SET_DATA:
            raise fail("inplace-view", "assigning to .data rebinds a tensor: a graph keeps the old address")

    def _check_to(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        targets = [*args[1:], *kwargs.values()]
        if any(isinstance(target, str) and target.startswith("cpu") for target in targets):
            raise fail("host-sync", ".to('cpu') copies to the host and blocks; copy_ into a pinned buffer with non_blocking=True")
        moves = any(isinstance(target, (str, torch.device, Tensor)) for target in targets)
        if moves and self.memory.kind(args[0]) == "pinned":
            raise fail("mixed-residence", f"{self.memory.name(args[0])}.to(device) allocates; copy_ it into a device buffer instead")

    def check_operation(self, call: OpCall) -> None:
        name, schema = call.schema.name, call.schema
        if torch.get_default_dtype() is not self._default_dtype:
            raise fail("default-dtype", f"{name} follows torch.set_default_dtype in the step, which a replay does not repeat")
        if name == "aten::lift_fresh":
            if self.scalar_store and call.args[0].dim() == 0:
                return
            raise fail("host-data", "Python data becomes a tensor here: a copy from pageable memory, which a graph cannot contain")
        self._check_host_reads(call)
        if name.startswith(_COLLECTIVES):
            raise fail("collective", f"{name} communicates with other processes, which a replay on the tape does not repeat")
        self._check_shape(call)
        self._check_generator(call)
        pinned = self._check_inputs(call)
        if schema.inplace_view and (name not in _SAME_MEMORY or self.memory.is_buffer(call.args[0])):
            raise fail("inplace-view", f"{self._name(call)} changes the shape or the address of a tensor in place; use a view instead")
        if pinned and not schema.view and not (call.operation and call.operation.mapped):
            self._check_residence(call, pinned)

    def _name(self, call: OpCall) -> str:
        """The operation, and the function that the step calls if it has another name."""
        name, function = call.schema.name, self.function
        is_same = function.strip("_") in (name.removeprefix("aten::").strip("_"), "setitem", "")
        return name if is_same else f"{name} in {function}()"

    def _check_host_reads(self, call: OpCall) -> None:
        name = call.schema.name
        if call.schema.reads_data:
            raise fail("host-sync", f"{self._name(call)} copies a tensor's value to the host, which blocks until the device is done")
        if name in _SYNCING_OPS:
            raise fail("host-sync", f"{self._name(call)} {_SYNCING_OPS[name]}")
        arguments, instead = _HOST_ARGUMENTS.get(name, ("", ""))
        for argument in arguments.split():
            if isinstance(call.values[argument], Tensor):
                raise fail("host-sync", f"{name} reads the tensor `{argument}` on the host; use {instead}")
        if name == "aten::copy_" and self.memory.kind(call.values["src"]) == "literal":  # more than one element are filled
            raise fail("host-data", "a number is written to one element: a copy from pageable memory; use fill_")
        condition, why = _SYNCING_CALLS.get(name, (None, ""))
        if condition is not None and condition(call.values):
            raise fail("host-sync", f"{self._name(call)} {why}")

    def _check_shape(self, call: OpCall) -> None:
        name, dynamic = call.schema.name, call.schema.dynamic
        if not dynamic and name not in _INDEX_PUT:
            return
        values = call.values
        is_known = name == "aten::index" and not _has_mask(values["indices"])
        if dynamic and not is_known and values.get("output_size") is None:
            raise fail("dynamic-shape", f"{name} has a result whose shape depends on values; use a mask and torch.where")
        if name not in _INDEX_PUT:
            return
        is_number = self.memory.kind(values["values"]) == "literal" and not values["accumulate"]
        if _has_mask(values["indices"]):
            if not is_number or len(tensors_in(values["indices"])) > 1:  # torch turns one mask and a Python scalar into masked_fill_
                raise fail("dynamic-shape", f"{name} with a bool mask counts the mask on the host; use torch.where or masked_fill_")
        elif is_number:
            raise fail("host-data", "a number is written at indices: a copy from pageable memory; use index_fill_, scatter_ or a tensor")

    def _check_generator(self, call: OpCall) -> None:
        if not call.schema.seeded or call.values.get("dropout_p") == 0:
            return  # attention without dropout draws nothing
        generator = call.values.get("generator") or torch.default_generator
        if generator_key(generator) not in self.generators:
            raise fail("generator", f"{call.schema.name} draws from its generator, which is not among capture(generators=...)")

    def _check_inputs(self, call: OpCall) -> list[Tensor]:
        """Check residence and registration; returns the inputs in pinned memory."""
        name, pinned = call.schema.name, list[Tensor]()
        check_plain(name, call.inputs)
        for tensor in call.inputs:
            if tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0:
                raise fail("freed-input", f"{name} uses {self.memory.name(tensor)}, whose memory was freed")
            kind = self.memory.kind(tensor)
            if kind == "foreign":
                raise fail("foreign-intermediate", f"{name} uses a tensor from another capture; pass it through a buffer")
            if kind == "unknown":
                unknown = f"a tensor {tuple(tensor.shape)} {tensor.dtype} that is neither a buffer nor a constant of this step"
                raise fail(
                    "unregistered-input",
                    f"{name} uses {unknown}; pass weights as StaticBuffers(..., constants={{'model': module}}); an engine takes "
                    "its models' parameters and registered buffers",
                )
            if kind == "pinned":
                pinned.append(tensor)
        for tensor in call.targets:
            if self.memory.kind(tensor) == "constant":
                raise fail("constant-write", f"{name} writes the constant {self.memory.name(tensor)}; declare it with a BufferSpec")
        return pinned

    def _check_residence(self, call: OpCall, pinned: Sequence[Tensor]) -> None:
        name, values = call.schema.name, call.values
        if name != "aten::copy_" or len(pinned) == 2:
            raise fail("mixed-residence", f"{name} computes on pinned {self.memory.name(pinned[0])}; only copy_ to or from the device may")
        if not values["non_blocking"]:
            raise fail("blocking-copy", f"copy_ with pinned {self.memory.name(pinned[0])} blocks the host without non_blocking=True")
        repeated = values["src"] is pinned[0] and values["src"].numel() != values["self"].numel()
        if repeated or not pinned[0].is_contiguous():
            # torch would make a contiguous copy on the host, only during the capture
            raise fail(
                "pinned-copy", f"copy_ with a strided or broadcast view of pinned {self.memory.name(pinned[0])} is staged on the host"
            )


def check_plain(name: str, tensors: Sequence[Tensor]) -> None:
    """CaptureError unless arguments or results are plain tensors."""
    for tensor in tensors:
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise fail("wrapper-subclass", f"{name} uses a {type(tensor).__name__}, which has no memory; use the tensors that it wraps")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else tensor.dtype if tensor.is_quantized else tensor.layout
            raise fail("unregistered-input", f"{name} uses a {kind} tensor; keep it inside a torch.library.custom_op")


def _check_factory(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    device = kwargs.get("device")
    name = f"torch.{getattr(func, '__name__', 'factory')}"
    if device is None:
        raise fail("missing-device", f"{name} without device= creates a host tensor on a GPU machine; pass device=buffers.device")
    if (isinstance(device, str) and device.startswith("cpu")) or kwargs.get("pin_memory"):
        raise fail("missing-device", f"{name} creates a host tensor; pass device=buffers.device, or declare a pinned buffer")


def _has_mask(indices: object) -> bool:
    return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(indices))


def _called_by_buffers() -> bool:
    frames = itertools.islice(traceback.walk_stack(sys._getframe(2)), 4)
    return any(frame.f_code.co_filename == storage_key.__code__.co_filename for frame, _ in frames)
