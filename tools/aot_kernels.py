"""Compiles the Triton kernels ahead of time for several GPUs: registers and spills by the report of ptxas, occupancy, byte roofline.

Specialised like launches on a GPU: pointers and strides divisible by 16, the default tile sizes. Bytes are those of one launch, by
tools/launch_bytes.py; `least_us` is their time at the memory bandwidth. Nothing is measured on a GPU.
One JSON document: `python -m tools.aot_kernels`. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stepgraph.graphs.attention import paged

MAX_WARPS, MAX_BLOCKS = 64, 32  # most per multiprocessor, the same for these architectures
PARTITIONS, PARTITION_REGISTERS = 4, 16_384
WARP_REGISTERS, BLOCK_SHARED, SHARED_UNIT = 256, 1024, 128  # registers of a warp are rounded up; each block reserves shared memory


class Device(NamedTuple):
    """Resources of an architecture, from NVIDIA's CUDA programming guide and the data sheet of one GPU."""

    shared_bytes: int  # per multiprocessor
    gigabytes_per_second: float


DEVICES = {80: Device(164 << 10, 2039), 90: Device(228 << 10, 3352), 100: Device(228 << 10, 8000)}  # A100 80GB SXM, H100 SXM, B200
ARCHS = tuple(DEVICES)


class Usage(NamedTuple):
    """Resources of one kernel on one architecture."""

    kernel: str
    arch: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    warps: int
    wide_loads: int  # loads of 16 bytes per thread
    fences: int  # waits until stores are visible beyond the block
    blocks: int  # resident on a multiprocessor
    occupancy: float  # share of a multiprocessor's warps


class Variant(NamedTuple):
    label: str
    kernel: Any  # triton.JITFunction
    signature: dict[str, str]
    constants: Mapping[str, object]
    warps: int
    registers: int | None = None  # limit per thread, as in the launch
    stages: int = 3


def variants(every: bool = False) -> list[Variant]:
    """Every kernel, for all logit types and the largest numbers of tiles and drafts. every: also rare combinations."""
    from stepgraph.sampling.kernels.triton import choice, rejection

    found = []
    for dtype, aligned in itertools.product(("fp32", "bf16", "fp16"), (True, False)):
        constants = {"WORDS": choice.CHOICE_TILE // 32, "ALIGNED": aligned}
        given = f"{dtype}{'' if aligned else ', any width'}"
        for has_bits in (False, True):
            types = [f"*{dtype}", "*i32", "*i64", "*i1", "*i64" if has_bits else None, "*i64", "*i64", *["i32"] * 5]
            found.append(
                _variant(f"{'mapped' if has_bits else 'masked'}_candidates {given}", choice.masked_candidates, types, constants, 8)
            )
        types = [f"*{dtype}", *[None] * 5, "*i64", *["i32"] * 5]
        found.append(_variant(f"free_candidates {given}", choice.masked_candidates, types, constants, 8))
    found += [each._replace(label=f"{each.label}, many rows", warps=4) for each in found if each.label.endswith("s bf16")]
    for has_finite in (True, False):
        types = ["*i64", "*i1" if has_finite else None, "*i64", "i32"]
        found.append(_variant(f"take_best {has_finite}", choice.take_best, types, {"TILES": 256}, 1))
    for known in (True, False):
        types = ["*i64", "*i1", *["*i64"] * 5, "*i64" if known else None, *["*i64"] * 3, "i32", "i32"]
        label = f"accept_chain {'known' if known else 'compared'}"
        found.append(_variant(label, choice.accept_chain, types, {"POSITIONS": 16, "STOPS": 16}, 1))
    types = ["*fp32", "*fp32", "*i64", "*i1", "*i1", *["*i64"] * 7, *["i32"] * 6]
    constants = {"POSITIONS": 16, "TILE": rejection.REJECTION_TILE}
    found.append(_variant("rejection_candidates", rejection.rejection_candidates, types, constants, 8))
    types = ["*i64", "*i1", *["*i64"] * 4, "i32", "i32"]
    found.append(_variant("rejection_tokens", rejection.rejection_tokens, types, {"POSITIONS": 16, "TILES": 256}, 8))
    return found + _mask_variants(every)


def _mask_variants(every: bool) -> list[Variant]:
    """Kernels of tags, masks and log-probabilities, with every setting of a request."""
    from stepgraph.sampling.kernels.triton import choice, processors

    types: list[str | None] = [*["*i64"] * 4, "i32", "*i64", "*i64", "*i1", *["i32"] * 6]
    found = [_variant("check_tags", choice.check_tags, types, {"POSITIONS": 16}, 1)]
    for dtype, has_masks, has_ids in itertools.product(("fp32", "bf16", "fp16"), (True, False), (True, False)):
        of_mask = ["*i32", "*i64", "*i1", "*i64"] if has_masks else [None] * 4
        types = [f"*{dtype}", *of_mask, "*i64" if has_ids else None, "*i64", "*fp32", "*i64", "*fp32", "*i64", "*i1", "*i32"]
        types += ["*i64", "*i64", "*fp32", "*i32", *["i32"] * 15]
        constants = {"WORDS": processors.PROCESS_TILE // 32, "BIASES": 256}
        label = f"{'mapped ' if has_ids else ''}process_tile {dtype} {'masked' if has_masks else 'free'}"
        found.append(_variant(label, processors.process_tile, types, constants, 4)._replace(registers=processors.PROCESS_REGISTERS))
    found.append(_variant("sum_tile bf16", processors.sum_tile, ["*bf16", "*fp32", *["i32"] * 4], {"TILE": processors.SUM_TILE}, 8))
    types = ["*bf16", "*fp32", "*i64", "*fp32", "*fp32", *["i32"] * 7]
    found.append(_variant("report_token bf16", processors.report_token, types, {"TILES": 64}, 1))
    types = ["*bf16", "*fp32", "*i64", "*fp32", "*i64", "*i32", "*fp32", *["i32"] * 12]
    found.append(_variant("rank_tokens bf16", processors.rank_tokens, types, {"TILE": processors.TOP_TILE}, 8))
    for has_status in (True, False):
        types = ["*i32", "*i64" if has_status else None, "*i1", "*i64", "i32"]
        found.append(_variant(f"judge_positions {has_status}", processors.judge_positions, types, {"TILES": 512}, 1))
    return found + _grammar_variants(every) + _filter_variants() + attention_variants() + _packed_variants(every)


def _grammar_variants(every: bool) -> list[Variant]:
    """`advance_rows` as launched for 131,072 tokens, and for unaligned mask rows. every: all combinations that are launched."""
    from stepgraph.sampling.kernels.triton import advance

    types = [*["*i64"] * 4, "*i32", "*u8", *["*i32"] * 6, "*i64", "*i64"]
    tiles = {"WORDS": advance.WORDS, "LEGAL_WORDS": advance.LEGAL_WORDS, "LANES": advance.LANES}
    cases = [  # of_last_round, new, follows, forces, merges, chain, aligned
        (True, True, False, False, False, False, True),
        (False, False, False, False, False, False, True),
        (False, False, False, False, False, False, False),
        (True, True, True, False, False, False, True),
        (False, False, True, True, True, True, True),
        (False, False, True, True, False, True, False),
    ]
    if every:
        of_last = itertools.product((True,), (True, False), (True, False), (False,), (False,), (False,))
        of_this = itertools.product((False,), (False,), (True,), (True,), (True, False), (True, False))
        kinds = (*of_last, cases[1][:-1], *of_this)
        cases = [(*kind, aligned) for kind in kinds for aligned in (True, False)]
    found = []
    for of_last_round, new, follows, forces, merges, chain, aligned in cases:
        given = ["*i32" if follows else None, *["*i64" if forces else None] * 2, *["i32"] * 15]
        flags = {"FILL_NEW": new, "BY_ROW": of_last_round, "MERGES": merges, "TAKES_FORCED": chain}
        label = f"advance_rows {'new and ' * new}{'last, ' * of_last_round}{'aligned' if aligned else 'any width'}"
        forced = f", forced by {'merging' if merges else 'longest match'}{' in a chain' * chain}"
        label += forced if forces else ", after forced ones" * follows
        variant = _variant(label, advance.advance_rows, [*types, *given], {**flags, "ALIGNED": aligned, **tiles}, advance.WARPS)
        found.append(variant._replace(registers=advance.REGISTERS[aligned and not merges]))
    return found


def _filter_variants() -> list[Variant]:
    """Kernels of top-k and top-p, as launched for 262,144 tokens."""
    from stepgraph.sampling.kernels.triton import filters
    from stepgraph.sampling.rng import GOLDEN, Purpose, signed

    tile = filters.FILTER_TILE
    shape = {"TILE": tile, "TILES": 262_144 // tile}
    inputs = ["*fp32", "*fp32", "*i64", "*i64"]
    found = [_variant("tile_maxima fp32", filters.tile_maxima, ["*fp32", "*i64", "*i64", *["i32"] * 4], {"TILE": tile}, 8)]
    found.append(_variant("bucket_sums fp32", filters.bucket_sums, [*inputs, *["i32"] * 5], shape, 8))
    digits = {"BITS": filters.DIGIT_BITS, "WINDOW": filters.FIND_WINDOW // shape["TILES"]}
    types: list[str | None] = [*inputs, "*i32", "*i32", "*i64", *["i32"] * 6]
    found.append(_variant("find_least fp32", filters.find_least, types, digits | shape, 8)._replace(registers=filters.FIND_REGISTERS))
    for draws in (False, True):
        flags = {"DRAWS": draws, "SALT": signed(Purpose.DRAFT * GOLDEN)}
        types = ["*fp32", "*fp32", "*i64", "*i64", "*i64" if draws else None, *["*i64"] * 4, "*fp32", *["i32"] * 6]
        label = f"keep {'and draw' if draws else 'only'}"
        found.append(_variant(label, filters.keep, types, flags | shape, 8)._replace(registers=filters.KEEP_REGISTERS))
    return found


class AttentionCase(NamedTuple):
    """One shape of attention."""

    dtype: str
    size: int
    rows: int  # query rows: few in rounds, many in prompts
    groups: int = 4
    page: int = 16
    alone: bool = False  # keys are not split into parts
    capped: bool = False
    sinks: bool = False
    float8: bool = False  # type of the cache


def attention_variants() -> list[Variant]:
    """Rounds with all head sizes, prompts with two; other group sizes, page sizes and float16, each once."""
    from stepgraph.graphs.attention.triton import paged as paged_programs
    from stepgraph.graphs.layers.triton import slot_mapping as rope_programs

    launched = [AttentionCase("bf16", size, 16) for size in paged.HEAD_SIZES] + [AttentionCase("bf16", size, 64) for size in (64, 256)]
    launched += [AttentionCase("bf16", 96, 16, 3, 64, True), AttentionCase("fp16", 128, 64, 1, 32)]
    launched.append(AttentionCase("bf16", 256, 64, capped=True))  # Gemma 2
    launched += [AttentionCase("bf16", 64, rows, 8, sinks=True) for rows in (16, 64)]  # GPT-OSS
    launched += [AttentionCase("bf16", size, rows, float8=True) for size, rows in ((64, 16), (128, 16), (128, 64), (256, 32))]
    found = []
    for one in launched:
        tile = paged_programs.tile_for(one.rows, one.size, one.capped)
        kind, sums, cap = f"*{one.dtype}", None if one.alone else "*fp32", "fp32" if one.capped else None
        types = [
            kind,
            *["*u8" if one.float8 else kind] * 2,
            *["*i64"] * 3,
            kind if one.sinks else None,
            kind,
            *[sums] * 3,
            *["i32"] * 6,
            "fp32",
            cap,
        ]
        shape = {"size": one.size, "GROUPS": one.groups, "PAGE": one.page, "ROWS": tile.rows, "KEYS": tile.keys, "SIZE": tile.size}
        where = f"{one.groups} to a cache head, pages of {one.page}"
        where += ", one part" * one.alone + ", soft-capped" * one.capped + ", sinks" * one.sinks + ", float8" * one.float8
        label = f"attend_part {one.dtype} {one.size}, {tile.rows} rows, {where}"
        variant = _variant(label, paged_programs.attend_part, types, shape | {"WIDE": False}, tile.warps)
        found.append(variant._replace(stages=tile.stages, registers=tile.registers))
    for size in (64, 256):
        constants = {"size": size, "PARTS": paged_programs.MAX_PARTS, "COMBINED": paged_programs.COMBINED_SUMS // size, "SIZE": size}
        types = [*["*fp32"] * 3, "*bf16", "i32"]
        found.append(_variant(f"combine_parts {size}", paged_programs.combine_parts, types, constants, 2))
    types = [*["*bf16"] * 5, "*i64", *["*bf16"] * 3, *["i32"] * 7]
    for half, cache in itertools.product((128, 64), ("*bf16", "*u8")):
        constants, types[6:8] = {"HALF": half, "SIZE": 256, "PARTIAL": half < 128}, [cache] * 2
        found.append(_variant(f"rotate_heads {2 * half} of 256 into {cache[1:]}", rope_programs.rotate_heads, types, constants, 1))
    return [*found, *_dense_variants(), *_layer_variants()]


def _dense_variants() -> list[Variant]:
    """Kernels of head products, of norms over heads and states, and of activations."""
    from stepgraph.graphs.layers.dense import Activation
    from stepgraph.graphs.layers.triton import dense

    constants: dict[str, object] = {"ROWS": dense.WIDE_ROWS, "COLUMNS": dense.COLUMN_TILE, "INNER": dense.INNER_TILE, "WIDE": False}
    warps, stages, registers = (dense.WIDE_OPTIONS[name] for name in ("num_warps", "num_stages", "maxnreg"))
    found = []
    for label, bias in (("wide_product", None), ("wide_product with bias", "*bf16")):
        types = ["*bf16", "*bf16", bias, "*bf16", *["i32"] * 5]
        found.append(_variant(label, dense.wide_product, types, constants, warps)._replace(stages=stages, registers=registers))
    for size, adds, shifted in ((128, False, False), (4096, True, False), (16_384, True, True)):
        types = [*["*bf16", "*bf16" if adds else None] * 2, "*bf16", *["i32"] * 3, "fp32", "fp32"]
        constants = {"SIZE": size, "SHIFTED": shifted}
        found.append(_variant(f"normalise_row {size}", dense.normalise_row, types, constants, dense.warps_of(size)))
    for activation in Activation:
        constants = {"TILE": dense.ACTIVATED_TILE, "ACTIVATION": int(activation)}
        found.append(_variant(f"gate_tile {activation.name}", dense.gate_tile, ["*bf16", "*bf16", "i32"], constants, 4))
    return found


def _layer_variants() -> list[Variant]:
    """Kernels of adapters and experts, and of the slots, angles, masks and drafts of a round."""
    from stepgraph.graphs.layers.triton import experts, lora, slot_mapping
    from stepgraph.graphs.triton import drafting, host_nodes, proposing, publishing, sampled_stages, stages

    found = []
    for kind in ("bf16", "fp32"):
        types, wide = ["*i64" if name == "slots" else f"*{kind}" for name in ("states", "slots", "weights", "base", "output")], ["i32"] * 5
        constants = {"COUNT": lora.STATES_TILE, "OUTER": lora.OUTER_TILE, "INNER": lora.INNER_TILE, "WIDE": False}
        found.append(_variant(f"multiply_by_slot {kind}", lora.multiply_by_slot, [*types, *wide], constants, 4))
        types, constants = [f"*{kind}", "*i64", *[f"*{kind}"] * 3], {**experts.tiles_of(2 if kind == "bf16" else 4), "WIDE": False}
        found.append(_variant(f"multiply_by_expert {kind}", experts.multiply_by_expert, [*types, *wide], constants, 4))
    for logits, correction, groups in (("*bf16", None, 1), ("*fp32", "*fp32", 8)):
        choice, constants = experts.choose_row, {"EXPERTS": 256, "COUNT": 8, "GROUPS": groups, "NORMALISED": True}
        types_of_choice = [logits, correction, "*fp32", "*i64", *["i32"] * 4, "fp32"]
        found.append(_variant(f"choose_row {groups} groups", choice, types_of_choice, constants, 2 if correction else 1))
    types = ["*bf16", "*fp32", "*bf16", "i32", "i32"]
    found.append(_variant("combine_tile", experts.combine_tile, types, {"TILE": experts.COMBINED_TILE}, 4))
    types = [*["*i64"] * 4, *["i32"] * 3, "*i1", *["*i64"] * 4, *["i32"] * 4]
    found.append(_variant("place_row", slot_mapping.place_row, types, {"WIDTH": 16}, 1))
    types = [*["*i64"] * 5, *["i32"] * 4]
    found.append(_variant("shift_tile", slot_mapping.shift_tile, types, {"TILE": slot_mapping.SHIFT_TILE}, 1))
    types = ["*i64", *["*i64", "*i32"] * 2, "*i64", "*i64", "i32", "i32"]
    found.append(_variant("scatter_row", host_nodes.scatter_row, types, {"TILE": host_nodes.MASK_TILE}, 4))
    types = ["*i64", "*i1", "*i1", "*i64", "i32", *["*i64"] * 4, "*i32", "*i1", "*i64", *["*i1"] * 3, "*i64", *["i32"] * 7]
    found.append(_variant("select_row", drafting.select_row, types, {"WIDTH": 8}, 1))
    types = ["*i64", "*i64", "*i64", "i32", "*i64", "*i32", "*i1", "*i64", "*i64", "*i1", "*i64", *["i32"] * 11]
    found.append(_variant("choose_row", proposing.choose_row, types, {"BLOCK": 8}, 1))
    types = [*["*i64"] * 4, "*i32", *["i32"] * 3]
    found.append(_variant("append_row", proposing.append_row, types, {"COUNT": 8}, 1))
    types = ["*i32", "*i64", "*i64", *["i32"] * 4, "*i64", *["i32"] * 3]
    found.append(_variant("look_up_row", proposing.look_up_row, types, {"SEARCHED": proposing.SEARCHED, "COUNT": 8}, 4))
    types = [*["*i64"] * 10, "*i1", "*i1", *["*i64"] * 3, *["i32"] * 8]
    found.append(_variant("write_row", stages.write_row, types, {"COLUMNS": 16, "POSITIONS": 16}, 1))
    found.append(_variant("count_row", sampled_stages.count_row, ["*i64", "*i64", "*i64", "*i32", "i32", "i32"], {"POSITIONS": 16}, 1))
    types = [*["*i64"] * 4, "*bf16", "*i64", "*bf16", "*i64", *["i32"] * 6]
    found.append(_variant("keep_tile bf16", proposing.keep_tile, types, {"TILE": proposing.FEATURE_TILE}, 4))
    found.append(_variant("take_rows", publishing.take_rows, [*["*i64"] * 3, *["i32"] * 3], {"ROWS": 64}, 1))
    types = ["*i64", "*fp32", "*i64", "*i64", "*fp32", *["i32"] * 5]
    found.append(_variant("publish_round", publishing.publish_round, types, {"TILE": publishing.TILE}, 4))
    found.append(_variant("decide_end", publishing.decide_end, [*["*i64"] * 4, "*i32", "*i64", *["i32"] * 5], {"ROWS": 64}, 1))
    found.append(_variant("store_row", drafting.store_row, [*["*i64"] * 4, *["i32"] * 4], {"WIDTH": 8}, 1))
    types = ["*i64", "*fp32", "*bf16", "*bf16", "i32", "fp32"]
    return [*found, _variant("angles_of", slot_mapping.angles_of, types, {"HALF": 128}, 4)]


def _packed_variants(every: bool) -> list[Variant]:
    """Kernels of packed weights: the smallest and largest blocks, and float8. every: all kinds with all numbers of rows."""
    import torch

    from stepgraph.graphs.layers.quantised import KINDS, MIXED
    from stepgraph.graphs.layers.triton import experts, quantised

    kinds, found = {kind: name for name, kind in KINDS.items()} | {MIXED: "mixed"}, list[Variant]()
    few = [("Q4_1", 8), ("mixed", 16), ("INT4_128", 16), ("FP8", 16)]
    for (kind, name), rows, tiles in itertools.product(kinds.items(), (8, quantised.MAX_ROWS), quantised.MIN_TILES.values()):
        if every or (name, rows) in few:
            most, scales = quantised.max_tiles_of(kind), "*fp32" if kind.wide else "*fp16"
            constants = quantised.plan_of(kind, torch.bfloat16, tiles, most, rows, False)
            shape, types = f"{name}, {rows} rows, {constants['TILES']} tiles", ["*bf16", "*i32", scales, "*bf16", "*bf16", *["i32"] * 4]
            found.append(_variant(f"packed_product {shape}", quantised.packed_product, types, constants, quantised.WARPS))
            if tiles == 1:
                constants, types = constants | {"SCANNED": experts.SCANNED_CHOICES}, ["*bf16", "*i64", *types[1:], "i32"]
                found.append(_variant(f"packed_expert_product {shape}", experts.packed_expert_product, types, constants, quantised.WARPS))
    found = [each._replace(registers=quantised.REGISTERS) for each in found]
    for (kind, name), (rows, warps) in itertools.product(kinds.items(), quantised.ROW_WARPS.items()):
        if every or name in dict(few):
            constants = {**quantised.layout_of(kind), "ROWS": rows}
            given = ["*i64" if rows == 1 else None, "*i32", "*fp32" if kind.wide else "*fp16", "*bf16", "i32"]
            found.append(_variant(f"packed_rows {name}, {rows} rows", quantised.packed_rows, given, constants, warps))
    return found


def _variant(label: str, kernel: Any, types: Sequence[str | None], constants: Mapping[str, object], warps: int) -> Variant:
    """types: None for an argument that is None, which Triton compiles as a constant."""
    kinds = dict(itertools.zip_longest(kernel.arg_names, types))
    assert len(kinds) == len(types) + len(constants), f"{label}: {kernel.arg_names}, {types}"
    signature = {name: kind or "constexpr" for name, kind in kinds.items()}
    return Variant(label, kernel, signature, {name: constants.get(name) for name, kind in kinds.items() if kind is None}, warps)


def compile_usage(variant: Variant, arch: int) -> Usage:
    """Compile for `arch` with the assembler of the triton package."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(variant.signature.items())
        if kind.startswith("*") or name.endswith("_stride")
    }
    source = ASTSource(fn=variant.kernel, signature=variant.signature, constexprs=dict(variant.constants), attrs=aligned)
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "maxnreg": variant.registers, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    wide = len(re.findall(r"ld\.global\S*\.v4\.b32", compiled.asm["ptx"]))
    fences = len(re.findall(r"\.(?:gpu|sys)\.(?:acq_rel|acquire|release)\.|fence\.(?:acq_rel|sc)|membar\.", compiled.asm["ptx"]))
    report = _assemble(compiled.asm["ptx"], arch)
    registers, stack, stores, loads = (int(_find(pattern, report)) for pattern in _PATTERNS)
    shared = int(compiled.metadata.shared)
    blocks = resident_blocks(registers, shared, variant.warps, arch)
    occupancy = blocks * variant.warps / MAX_WARPS
    return Usage(variant.label, arch, registers, stores + loads, stack, shared, variant.warps, wide, fences, blocks, occupancy)


def resident_blocks(registers: int, shared: int, warps: int, arch: int) -> int:
    """Blocks that fit a multiprocessor, by registers of a thread, shared bytes and warps of a block."""
    by_registers = PARTITION_REGISTERS // _rounded(registers * 32, WARP_REGISTERS) * PARTITIONS // warps
    by_shared = DEVICES[arch].shared_bytes // _rounded(shared + BLOCK_SHARED, SHARED_UNIT)
    return min(MAX_BLOCKS, MAX_WARPS // warps, by_registers, by_shared)


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def launches(width: int, size: int) -> dict[str, dict[str, Any]]:
    """The document of tools/launch_bytes.py, run as a subprocess: Triton interprets or compiles for the whole life of a process."""
    command = [sys.executable, "-m", "tools.launch_bytes", "--vocabulary", str(width), "--size", str(size)]
    environment, root = os.environ | {"TRITON_INTERPRET": "1"}, Path(__file__).resolve().parent.parent
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=root, check=False)
    assert result.returncode == 0, result.stderr
    found: dict[str, dict[str, Any]] = json.loads(result.stdout.splitlines()[-1])
    return found


def spill_warnings(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each program that spills: bounds of registers hold for one assembler, and Triton is not pinned."""
    spilling = (each for each in table if each["spill_bytes"])
    return [f"warning: {each['kernel']} spills {each['spill_bytes']} bytes on sm_{each['arch']}" for each in spilling]


def roofline(launch: Mapping[str, Any], gigabytes_per_second: float) -> dict[str, Any]:
    return {**launch, "least_us": round(launch["bytes"] / gigabytes_per_second / 1e3, 3)}


_PATTERNS = (r"Used (\d+) registers", r"(\d+) bytes stack frame", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, f"the report of ptxas has no {pattern!r}: {text}"
    return found.group(1)


def _assemble(ptx: str, arch: int) -> str:
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    assembler = next(path for path in (folder / "ptxas-blackwell", folder / "ptxas") if path.exists())
    target = _find(r"\.target (sm_\w+)", ptx)
    assert target.startswith(f"sm_{arch}")
    with tempfile.TemporaryDirectory() as scratch:
        code = Path(scratch) / "kernel.ptx"
        code.write_text(ptx, encoding="utf-8")
        command = [str(assembler), "-v", f"--gpu-name={target}", str(code), "-o", str(code.with_suffix(".cubin"))]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr + result.stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHS, default=ARCHS, help="compute capabilities (default: all)")
    parser.add_argument("--all", action="store_true", help="also compile rare combinations of arguments")
    parser.add_argument("--first", action="store_true", help="compile only the first variant of each kernel")
    parser.add_argument("--vocabulary", type=int, default=128_256, metavar="TOKENS", help="width of logits (default: %(default)s)")
    parser.add_argument("--size", type=int, default=2048, metavar="ELEMENTS", help="width of hidden states (default: %(default)s)")
    speeds = ", ".join(f"{device.gigabytes_per_second:.0f} of sm_{arch}" for arch, device in DEVICES.items())
    parser.add_argument("--bandwidth", type=float, metavar="GB/S", help=f"memory bandwidth of every architecture (default: {speeds})")
    args = parser.parse_args()
    moved = launches(args.vocabulary, args.size)
    speed = {arch: args.bandwidth or DEVICES[arch].gigabytes_per_second for arch in args.arch}
    chosen = variants(args.all)
    if args.first:
        chosen = list({variant.kernel: variant for variant in reversed(chosen)}.values())
    pairs = itertools.product(chosen, args.arch)
    table = [compile_usage(variant, arch)._asdict() | roofline(moved[variant.kernel.__name__], speed[arch]) for variant, arch in pairs]
    for warning in spill_warnings(table):
        print(warning, file=sys.stderr)
    print(json.dumps(table))
