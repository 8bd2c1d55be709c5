"""Operations: their schemas, and how a replay repeats one in place: as it is, through its `.out` overload, or by running and copying."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from stepgraph.graphs.tape.small_operations import small_operation
from stepgraph.sampling.kernels.operation import OPERATIONS

EMPTY = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::empty_permuted", "aten::new_empty", "aten::new_empty_strided"}
_COPIES = {"aten::copy_", "aten::clone", "aten::_to_copy", "aten::cat", "aten::stack"}
_FILLS = {
    "aten::fill_", "aten::zero_", "aten::full", "aten::zeros", "aten::ones", "aten::full_like", "aten::zeros_like", "aten::ones_like",
    "aten::new_zeros", "aten::new_ones", "aten::new_full", "aten::scalar_tensor", "aten::arange",
}  # fmt: skip
_LAYOUT = {"dtype", "layout", "device", "pin_memory", "memory_format"}  # fixed by the recorded output
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POISON_INT = 0x5B  # as every byte: out of range as an index in any wider integer


def tensors_in(value: object) -> list[Tensor]:
    """Every tensor in the (nested) arguments or results of an operation."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []  # list[Tensor]() and isinstance() of a number take longer than all else here
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        if type(item) is Tensor:
            found.append(item)
        elif item is not None and type(item) not in (int, bool, float, torch.dtype):
            found += tensors_in(item)
    return found


class Signature:
    """The parts of a schema and the tags that the tape uses."""

    def __init__(self, func: OpOverload) -> None:
        schema, arguments = func._schema, func._schema.arguments
        self.name = schema.name
        self.defaults: dict[str, Any] = {a.name: a.default_value if a.has_default_value() else None for a in arguments}  # in order
        self.positional = tuple(a.name for a in arguments if not a.kwarg_only)
        self.outs = tuple(a.name for a in arguments if a.is_out)
        self.writes = tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)  # including outs
        self.returns = len(schema.returns)
        self.mutable = schema.is_mutable
        self.view = not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
        self.seeded = torch.Tag.nondeterministic_seeded in func.tags
        self.reads_data = torch.Tag.data_dependent_output in func.tags
        self.dynamic = torch.Tag.dynamic_output_shape in func.tags  # the shape of its result depends on values
        self.inplace_view = torch.Tag.inplace_view in func.tags


signature = functools.cache(Signature)  # torch builds schemas and tags at every access


class OpCall:
    """One call of an operation, with what its schema says about it."""

    def __init__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.schema = signature(func)
        self.inputs = tensors_in([args, kwargs])
        self.targets = [tensor for name in self.schema.writes for tensor in tensors_in(self.values[name])]  # tensors that it writes
        # Their schemas do not name what they write.
        if self.schema.name in {"aten::native_batch_norm", "aten::batch_norm_update_stats"} and self.values.get("training", True):
            self.targets += tensors_in([self.values["running_mean"], self.values["running_var"]])
        self.operation = OPERATIONS.get(self.schema.name)
        self.native: Callable[[], object] | None = None  # the call in C, set by `run`

    def run(self) -> Any:
        """Run the operation; in C where that is possible, without torch's dispatcher."""
        if self.operation is not None and (prepared := self.operation.prepare(*self.args)) is not None:
            self.native = prepared
            prepared()
            return None
        return self.func(*self.args, **self.kwargs)

    @property
    def allocated(self) -> list[Tensor]:
        """Outputs of an Operation that its caller has allocated; dispatch modes do not see the allocation."""
        return [] if self.operation is None else tensors_in(self.operation.outputs_in(self.args))

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """The arguments by their schema names, with defaults filled in."""
        values = dict(self.schema.defaults)
        values.update(zip(values, self.args, strict=False))
        values.update(self.kwargs)
        return values


def replay_of(call: OpCall, result: object, results: Sequence[Tensor], fresh: Sequence[Tensor]) -> tuple[str, Callable[[], object] | None]:
    """How to repeat a call and rewrite its recorded `result` in place: its kind in the report, and what every replay calls, if anything.

    results: its tensors; fresh: those that it created.
    """
    func, args, kwargs, name, mutable = call.func, call.args, call.kwargs, call.schema.name, call.schema.mutable
    if name in EMPTY or (not fresh and not mutable and results):
        return "view", None
    kind = "copy" if name in _COPIES else "fill" if name in _FILLS else "kernel"
    if call.operation is None and len(results) == 1 and (not fresh or not mutable):
        small = small_operation(name, call.values, results[0])
        if small is not None and (not fresh or _repeats_exactly(small, fresh, compare=True)):
            return kind, small
    if (promoted := _promoted_call(call, results, fresh)) is not None:
        return "copied", promoted
    if not fresh:  # mutates its arguments, or is an assertion
        return kind, call.native or functools.partial(func, *args, **kwargs)
    if name == "aten::_to_copy":
        return kind, functools.partial(fresh[0].copy_, args[0])
    replay_call = None if mutable else _out_call(call, result)
    # The second draw of a random operation differs from the first.
    if replay_call is not None and _repeats_exactly(replay_call, fresh, compare=not call.schema.seeded):
        return kind, replay_call
    return "copied", lambda: _copy_all(tensors_in(result), tensors_in(func(*args, **kwargs)))


def _promoted_call(call: OpCall, results: Sequence[Tensor], fresh: Sequence[Tensor]) -> Callable[[], object] | None:
    """The replay of an operation that converts integers to torch's default dtype, which may be another one at a replay; None for others."""
    targets = {id(tensor) for tensor in call.targets}
    reads = [tensor for tensor in call.inputs if id(tensor) not in targets]
    is_real = any(tensor.is_floating_point() for tensor in results) or any(isinstance(value, float) for value in call.values.values())
    if not reads or not is_real or any(tensor.is_floating_point() or tensor.is_complex() for tensor in reads):
        return None
    if call.schema.seeded or not (call.schema.outs or (fresh and not call.schema.mutable)) or call.values.get("dtype") is not None:
        return None
    dtype, operation = torch.get_default_dtype(), functools.partial(call.func, *call.args, **call.kwargs)

    def repeat() -> None:
        args, kwargs = tree_map_only(
            Tensor, lambda each: each if id(each) in targets else each.to(dtype), (operation.args, operation.keywords)
        )
        _copy_all(results, tensors_in(operation.func(*args, **kwargs)))

    return repeat if _repeats_exactly(repeat, results, compare=True) else None


def _out_call(call: OpCall, result: object) -> Callable[[], object] | None:
    overload = out_overload(call.func)
    if overload is None:
        return None
    outs, taken, first = signature(overload).outs, signature(overload).defaults, call.schema.positional
    results = [result] if len(outs) == 1 else list(result) if isinstance(result, (tuple, list)) else []
    if len(results) != len(outs) or any(value is None for value in results):
        return None
    positional = [call.values[name] for name in first if name in taken]
    keywords = {name: call.values[name] for name in call.schema.defaults if name in taken and name not in first}
    return functools.partial(overload, *positional, **keywords, **dict(zip(outs, results, strict=True)))


@functools.cache
def out_overload(func: OpOverload) -> OpOverload | None:
    """The overload of `func` that writes to given tensors; found by schema."""
    packet = func._overloadpacket
    for overload_name in packet.overloads():
        candidate: OpOverload = getattr(packet, overload_name)
        outs = signature(candidate).outs
        if outs and len(outs) == signature(func).returns and _same_inputs(func, candidate):
            return candidate
    return None


def _same_inputs(func: OpOverload, candidate: OpOverload) -> bool:
    required = [(a.name, str(a.type)) for a in func._schema.arguments]
    offered = [(a.name, str(a.type)) for a in candidate._schema.arguments if not a.is_out]
    missing = [item for item in required if item not in offered]
    extra = [item for item in offered if item not in required]
    defaulted = {a.name for a in candidate._schema.arguments if a.has_default_value()}
    return all(name in _LAYOUT for name, _ in missing) and all(name in defaulted for name, _ in extra)


def _repeats_exactly(call: Callable[[], object], fresh: Sequence[Tensor], compare: bool) -> bool:
    """Try the replay once: an `.out` kernel may be missing, or its last bits may differ from the functional one."""
    words = [_words(tensor) for tensor in fresh]
    before, places = [tensor.clone() for tensor in words], [(t.shape, t.stride(), t.storage_offset()) for t in fresh]
    for tensor, word in zip(fresh, words, strict=True):
        word.fill_(_poison_of(tensor.dtype))
    try:
        call()
    except (RuntimeError, TypeError):
        exact = False
    else:
        kept = all(tensor.shape == shape for tensor, (shape, *_) in zip(fresh, places, strict=True))
        exact = kept and (not compare or all(map(torch.equal, before, words)))
    if not exact:
        for tensor, place in zip(fresh, places, strict=True):
            tensor.as_strided_(*place)  # the kernel may have resized it
        _copy_all(words, before)
    return exact


def _words(tensor: Tensor) -> Tensor:
    """The memory of a tensor as integers of the size of its elements."""
    real = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor) if tensor.is_complex() else tensor  # the same memory
    return real.view(_BITS[real.element_size()])


@functools.cache
def _poison_of(dtype: torch.dtype) -> int:
    """What `poison` writes, as one of `_words`."""
    number = torch.zeros(1, dtype=dtype)
    poison([number])
    return int(_words(number).flatten()[0])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether shape, dtype and bytes are equal."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_words(a.detach()), _words(b.detach()))


def _copy_all(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        if target is not source:  # a mutating operation returns its own argument
            target.copy_(source)


def whole(tensor: Tensor) -> Tensor:
    """All bytes of the storage of `tensor`."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def poison(tensors: Iterable[Tensor]) -> None:
    """Fill memory with NaN or with large odd integers, so that reads of stale intermediates change the result."""
    for tensor in tensors:
        if tensor.dtype == torch.bool:
            whole(tensor).fill_(1)
        else:
            whole(tensor).fill_(0xFF if tensor.is_floating_point() or tensor.is_complex() else _POISON_INT)
