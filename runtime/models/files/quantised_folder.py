"""Quantised weights in safetensors files: FP8, compressed-tensors and GPTQ in four and eight bits, AWQ in four, MXFP4 of GPT-OSS."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs.layers.quantised import TILE, Grouped
from stepgraph.runtime.models.files.weights import FLOATS, SafetensorsSource, Source, StoredTensor

_AWQ_COLUMNS = [0, 4, 1, 5, 2, 6, 3, 7]  # the index of each column among the eight fields of a word
_FP8_BLOCK = 128
_ROWS_AT_ONCE = 16 * TILE
_FP8_SCALES = ("weight_scale", "weight_scale_inv")
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_SCALES = (*FLOATS, "F8_E8M0")
# Dimension of the rows, packed dimension, names of the stored tensors; the last may be the group of each inner index.
_PACKED_FORMATS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "pack-quantized": (0, 1, ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")),
    "awq": (1, 1, ("qweight", "scales", "qzeros")),
    "gptq": (1, 0, ("qweight", "scales", "qzeros", "g_idx")),
}


class QuantisationScheme(NamedTuple):
    layout: str  # "fp8" (also for whole bytes), "mxfp4", or one of _PACKED_FORMATS
    group_size: int = -1  # inner indices that share a scale; -1: a whole row
    zero_offset: int = 0  # added to words of zero points; fields carry, since words were subtracted
    bits: int = 4  # per weight in a word
    asymmetric: bool = False  # zero points are required
    ordered: bool = False  # inner indices are in any group


def read_scheme(config: object) -> QuantisationScheme:
    """config: `quantization_config` of a config.json. Raises ValueError that names the field."""
    if not isinstance(config, Mapping):
        raise ValueError(f"config.quantization_config: got {config!r:.200}, expected an object")
    fields = ConfigFields(config, "config.quantization_config")
    method = fields.one_of("quant_method", "compressed-tensors", "fp8", "awq", "gptq", "mxfp4")
    if method == "compressed-tensors":
        return _read_compressed_tensors(fields)
    if method == "fp8":
        fields.one_of("weight_block_size", None, [_FP8_BLOCK, _FP8_BLOCK])
    if method in ("fp8", "mxfp4"):
        return QuantisationScheme(str(method))
    if method == "awq":
        fields.one_of("bits", 4)
        fields.one_of("version", "gemm")
        fields.one_of("zero_point", True)
        return QuantisationScheme("awq", fields.group_size())
    fields.one_of("dynamic", None, {})
    eight, ordered = fields.one_of("bits", 4, 8) == 8, fields.one_of("desc_act", None, False, True) is True
    offset = 0 if fields.one_of("checkpoint_format", None, "gptq", "gptq_v2") == "gptq_v2" else 0x01010101 if eight else 0x11111111
    return QuantisationScheme("gptq", fields.group_size(), offset, 8 if eight else 4, ordered=ordered)


def _read_compressed_tensors(fields: ConfigFields) -> QuantisationScheme:
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        fields.one_of(name, None, {})
    stored_format = fields.one_of("format", "float-quantized", "int-quantized", "pack-quantized")
    groups = fields.config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ValueError(f"{fields.path}.config_groups: got {groups!r:.200}, expected an object with one group")
    group = fields.inner("config_groups").inner(str(next(iter(groups))))
    group.one_of("targets", ["Linear"])
    group.one_of("output_activations", None)
    weights = group.inner("weights")
    weights.one_of("type", "float" if stored_format == "float-quantized" else "int")
    bits = weights.one_of("num_bits", *((4, 8) if stored_format == "pack-quantized" else (8,)))
    assert isinstance(bits, int)
    if stored_format == "float-quantized":  # activations are not quantised, even if the scheme quantises them
        if weights.one_of("strategy", "tensor", "channel", "block") == "block":
            weights.one_of("block_structure", [_FP8_BLOCK, _FP8_BLOCK])
        return QuantisationScheme("fp8")
    if stored_format == "int-quantized":
        weights.one_of("strategy", "tensor", "channel")
        weights.one_of("symmetric", None, True)
        return QuantisationScheme("fp8", bits=bits)
    group.one_of("input_activations", None)
    ordered = weights.one_of("actorder", None, "static", "weight", "group") == "group"
    grouped = weights.one_of("strategy", "group", "channel") == "group"
    asymmetric = weights.one_of("symmetric", None, True, False) is False
    return QuantisationScheme("pack-quantized", weights.group_size() if grouped else -1, 0, bits, asymmetric, ordered)


class ConfigFields(NamedTuple):
    """An object of a config, and its path for error messages."""

    config: Mapping[str, Any]
    path: str

    def one_of(self, name: str, *accepted: object) -> object:
        value = self.config.get(name)
        if not any(value == each and type(value) is type(each) for each in accepted):
            expected = ", ".join(map(repr, accepted))
            raise ValueError(f"{self.path}.{name}: got {value!r:.200}, expected {'one of ' * (len(accepted) > 1)}{expected}")
        return value

    def inner(self, name: str) -> ConfigFields:
        value = self.config.get(name)
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.path}.{name}: got {value!r:.200}, expected an object")
        return ConfigFields(value, f"{self.path}.{name}")

    def group_size(self) -> int:
        size = self.one_of("group_size", -1, 32, 64, 128)
        assert isinstance(size, int)
        return size


class QuantisedSource:
    """The tensors of a folder, with each quantised weight as one tensor under its usual name."""

    def __init__(self, source: SafetensorsSource, scheme: QuantisationScheme) -> None:
        self._source, self._scheme = source, scheme
        self.tensors: dict[str, StoredTensor] = dict(source.tensors)
        find = {"fp8": self._find_fp8, "mxfp4": self._find_mxfp4}.get(scheme.layout, self._find_words)
        self._quantised = {name for stored in source.tensors if (name := find(stored))}
        if not self._quantised:
            raise ValueError(f"config.quantization_config: got {scheme.layout}, and no tensor is quantised in this way")

    def read(self, name: str, dim: int = 0, part: slice | None = None) -> Tensor:
        """part: indices of dimension `dim`. Of a quantised weight the file is read for their values and for all scales."""
        if name not in self._quantised:
            return self._source.read(name, dim, part)
        if self._scheme.layout == "mxfp4":
            return self._read_mxfp4(name, dim, part)
        numbers, scales, minimums = self._read_numbers(name, dim, part)
        number_type = torch.float8_e4m3fn if self.tensors[name].kind == "FP8" else torch.uint8 if self._scheme.bits == 4 else torch.int8
        values = numbers.view(number_type).float()
        groups = values.view(len(values), scales.shape[1], -1)
        groups = groups * scales[:, :, None]
        return (groups if minimums is None else groups + minimums[:, :, None]).view(values.shape)

    def read_grouped(self, name: str, dim: int = 0, part: slice | None = None) -> Iterator[Grouped]:
        found = self._read_numbers(name, dim, part)
        parts = [[None] if each is None else each.split(_ROWS_AT_ONCE) for each in found]
        return (Grouped(*part) for part in itertools.zip_longest(*parts))

    def _read_numbers(self, name: str, dim: int = 0, part: slice | None = None) -> Grouped:
        """part: rows (dim 0), or inner indices (dim 1), whose bounds may require smaller groups."""
        read = self._read_fp8 if self._scheme.layout == "fp8" else self._read_words
        numbers, scales, minimums = read(name, dim, part)
        if part is not None:
            inner = self.tensors[name].shape[1]
            scales, minimums = _sliced(scales, inner, dim, part), None if minimums is None else _sliced(minimums, inner, dim, part)
        return Grouped(numbers, scales, minimums)

    def _scales(self, name: str) -> StoredTensor:
        found = self.tensors[name]
        if found.kind not in _SCALES:
            raise ValueError(f"{name}: got {found.kind}, expected scales of one of {', '.join(_SCALES)}")
        return found

    def _find_fp8(self, stored: str) -> str:
        """The name of the weight if `stored` is one of this scheme, otherwise empty. Its other tensors are removed from `tensors`."""
        tensor = self._source.tensors[stored]
        if tensor.kind != ("I8" if self._scheme.bits == 8 else "F8_E4M3") or len(tensor.shape) != 2:  # the check of shapes names others
            return ""
        module, (rows, inner) = stored.removesuffix(".weight"), tensor.shape
        scales = [self._scales(name).shape for suffix in _FP8_SCALES if (name := f"{module}.{suffix}") in self.tensors]
        shapes = [(), (1,), (rows,), (rows, 1)]
        shapes += [] if inner % _FP8_BLOCK else [(-(-rows // _FP8_BLOCK), inner // _FP8_BLOCK)]
        if len(scales) != 1 or scales[0] not in shapes:
            raise ValueError(f"{module}.{_FP8_SCALES[0]}: got shapes {scales}, expected one of {', '.join(map(str, shapes))}")
        for suffix in (*_FP8_SCALES, "input_scale"):  # input_scale is of activations, which are not quantised here
            self.tensors.pop(f"{module}.{suffix}", None)
        self.tensors[stored] = StoredTensor(tensor.shape, "INT8_RANGED" if self._scheme.bits == 8 else "FP8", True)
        return stored

    def _read_fp8(self, name: str, dim: int, part: slice | None) -> Grouped:
        """The values of the part, and all scales."""
        module = name.removesuffix(".weight")
        scale = next(self._source.read(each) for suffix in _FP8_SCALES if (each := f"{module}.{suffix}") in self._source.tensors).float()
        numbers, rows = self._source.read(name, dim, part).view(torch.uint8), self.tensors[name].shape[0]
        if scale.dim() == 2 and scale.shape != (rows, 1):
            scale = scale.repeat_interleave(_FP8_BLOCK, 0)[:rows]
        scale = scale.reshape(-1, 1).expand(rows, 1) if scale.numel() in (1, rows) else scale
        return Grouped(numbers, scale, torch.zeros_like(scale) if self._scheme.bits == 8 else None)

    def _find_mxfp4(self, stored: str) -> str:
        name, shape = stored.removesuffix("_blocks"), self._source.tensors[stored].shape
        if name == stored:
            return ""
        for part, wanted in (("blocks", (*shape[:3], 16)), ("scales", shape[:3])):
            found = self.tensors.pop(f"{name}_{part}", StoredTensor((), "no tensor", False))
            if (found.kind, found.shape) != ("U8", wanted):
                raise ValueError(f"{name}_{part}: got {found.kind} {found.shape}, expected U8 {wanted}")
        self.tensors[name] = StoredTensor((shape[0], 32 * shape[2], shape[1]), "MXFP4", True)
        return name

    def _read_mxfp4(self, name: str, dim: int, part: slice | None) -> Tensor:
        """[experts, inner, outer] in bfloat16, which holds every value: numbers of four bits times a power of two per 32 inner indices."""
        place = (0, None) if dim == 1 else (dim // 2, part)
        stored = [self._source.read(f"{name}_{each}", *place) for each in ("blocks", "scales")]
        values = torch.empty(len(stored[0]), self.tensors[name].shape[1], stored[0].shape[1], dtype=torch.bfloat16)
        for expert, blocks, scales in zip(values, *stored, strict=True):
            numbers = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()
            expert.copy_(torch.ldexp(torch.tensor(_FP4)[numbers], scales.int()[..., None] - 127).flatten(1).T)
        return values[:, part] if dim == 1 and part is not None else values

    def _find_words(self, stored: str) -> str:
        scheme, (row_dim, packed_dim, (words, scales, *others)) = self._scheme, _PACKED_FORMATS[self._scheme.layout]
        module, _, part = stored.rpartition(".")
        if part != words:
            return ""
        if f"{module}.{scales}" not in self.tensors:
            raise ValueError(f"{module}.{scales} is missing, expected it with {stored}")
        sizes, fields = self._source.tensors[stored].shape, 32 // scheme.bits
        if len(sizes) != 2 or 0 in sizes:
            raise ValueError(f"{stored}: got shape {sizes}, expected two dimensions above 0")
        first, second = (size * fields if dim == packed_dim else size for dim, size in enumerate(sizes))
        rows, inner = (second, first) if row_dim else (first, second)
        group = inner if scheme.group_size == -1 else scheme.group_size
        shape = (rows, inner // group) if scheme.layout == "pack-quantized" else (inner // group, rows)
        if (found := self._scales(f"{module}.{scales}").shape) != shape or inner % group:
            raise ValueError(f"{module}.{scales}: got shape {found}, expected {shape} for {stored} and groups of {group}")
        zeros, zeros_shape = f"{module}.{others[0]}", (shape[0], -(-rows // fields)) if row_dim else (-(-rows // fields), shape[1])
        required = row_dim or scheme.asymmetric or zeros in self.tensors
        expected: dict[str, tuple[str, tuple[int, ...]]] = {stored: ("I32", sizes)}
        expected |= {zeros: ("I32", zeros_shape)} if required else {}
        expected |= {f"{module}.{others[-1]}": ("I32", (inner,))} if scheme.ordered else {}
        for name, wanted in (expected if row_dim else expected | {f"{module}.weight_shape": ("I64", (2,))}).items():
            found_type = self._source.tensors.get(name, StoredTensor((), "no tensor", False))
            if (found_type.kind, found_type.shape) != wanted:
                raise ValueError(f"{name}: got {found_type.kind} {found_type.shape}, expected {wanted[0]} {wanted[1]} for {stored}")
        kind = "INT4" if group % _FP8_BLOCK else "INT4_128"
        if scheme.bits == 8:
            narrow = self.tensors[f"{module}.{scales}"].kind == "F16" and f"{module}.{others[0]}" not in self.tensors
            kind = "INT8" if narrow else "INT8_RANGED"
        kind = "INT_ORDERED" if scheme.ordered else kind
        for suffix in (words, scales, *others):
            self.tensors.pop(f"{module}.{suffix}", None)
        self.tensors[f"{module}.weight"] = StoredTensor((rows, inner), kind, True)
        return f"{module}.weight"

    def _read_words(self, name: str, dim: int, part: slice | None) -> Grouped:
        """The values of the part, and all scales and minimums."""
        module, scheme, shape = name.removesuffix(".weight"), self._scheme, self.tensors[name].shape
        row_dim, packed_dim, (words, *others) = _PACKED_FORMATS[scheme.layout]
        found = {each: self._source.read(stored) for each in others if (stored := f"{module}.{each}") in self._source.tensors}
        stored_dim = row_dim if dim == 0 else 1 - row_dim
        width = 32 // scheme.bits
        wanted = slice(part.start // width, -(-part.stop // width)) if part is not None and stored_dim == packed_dim else part
        found[words] = self._source.read(f"{module}.{words}", stored_dim, wanted)
        if scheme.layout == "pack-quantized":
            numbers, scales = _unpack(found["weight_packed"], scheme.bits), found["weight_scale"].float()
            stored_zeros = found.get("weight_zero_point")
            zeros = torch.tensor([[1 << scheme.bits - 1]]) if stored_zeros is None else _unpack(stored_zeros.T.contiguous(), scheme.bits).T
            if found["weight_shape"].tolist() != list(shape):
                raise ValueError(f"{module}.weight_shape: got {found['weight_shape'].tolist()}, expected {list(shape)}")
        elif scheme.layout == "awq":
            numbers, zeros = (_unpack(found[each], places=_AWQ_COLUMNS).T for each in ("qweight", "qzeros"))
            scales = found["scales"].float().T
        else:
            numbers = _unpack(found["qweight"].T.contiguous(), scheme.bits)
            zeros = _unpack(found["qzeros"] + scheme.zero_offset, scheme.bits).T
            scales, inner = found["scales"].float().T, shape[1]
            order = torch.arange(inner) // (inner if scheme.group_size == -1 else scheme.group_size)
            if not scheme.ordered and "g_idx" in found and not torch.equal(found["g_idx"].long(), order):
                raise ValueError(f"{module}.g_idx: got another order, expected the groups one after another (desc_act=False)")
        if scheme.ordered:  # groups of one inner index each
            groups, count = found[others[-1]].long(), scales.shape[1]
            if bool(((groups < 0) | (groups >= count)).any()):
                raise ValueError(f"{module}.{others[-1]}: got {groups.min()} to {groups.max()}, expected groups from 0 to {count - 1}")
            scales, zeros = (each.expand(-1, count)[:, groups] for each in (scales, zeros))
        if part is not None and stored_dim == packed_dim:
            numbers = numbers.narrow(dim, part.start % width, part.stop - part.start)
        if scheme.bits == 8:  # kept as signed integers
            numbers, zeros = numbers - 128, zeros - 128.0
            if self.tensors[name].kind == "INT8":
                return Grouped(numbers.contiguous(), scales.to(torch.float16).contiguous())
        return Grouped(numbers.contiguous(), scales.contiguous(), (-scales * zeros[: shape[0]]).contiguous())


def _sliced(values: Tensor, inner: int, dim: int, part: slice) -> Tensor:
    """Scales [out, groups] of a part of the weight. Groups become smaller if a bound of the part divides one."""
    if dim == 0:
        return values[part]
    group = inner // values.shape[1]
    smaller = math.gcd(group, part.start, part.stop)
    return values.repeat_interleave(group // smaller, 1)[:, part.start // smaller : part.stop // smaller]


def _unpack(words: Tensor, bits: int = 4, places: list[int] | None = None) -> Tensor:
    """The fields of each word in the last dimension, lowest bits first."""
    found = (words[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32) & (1 << bits) - 1).to(torch.uint8)
    return (found if places is None else found[..., places]).flatten(-2)


def quantised_source(source: SafetensorsSource, fields: Mapping[str, Any]) -> Source:
    """The source, or a QuantisedSource over it. fields: of the config.json in its folder."""
    config = fields.get("quantization_config")
    return source if not config else QuantisedSource(source, read_scheme(config))
