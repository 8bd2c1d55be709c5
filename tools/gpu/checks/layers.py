"""Calls of the layers' operations on random inputs: norms, SiLU, slots, angles, masks; and of the stages that write rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from stepgraph.graphs import drafting, host_nodes, proposing, sampled_stages, stages
from stepgraph.graphs.layers import dense, experts, lora, quantised, slot_mapping
from stepgraph.graphs.row_layout import Column, ResultLayout
from stepgraph.sampling.grammar.status import TAG_FIELDS, FinishCode
from tools.gpu.checks.operations import Call, filler

PAGE = 16


def calls(device: torch.device, tokens: int, size: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[Call]:
    """Least bytes: states, updates and results once each, and the weights."""
    rng = torch.Generator().manual_seed(size)
    wide, update = (torch.randn(tokens, 2 * size, generator=rng).to(device, dtype) for _ in range(2))
    states, update, weight = wide[:, :size].contiguous(), update[:, :size].contiguous(), wide[0, :size].contiguous()
    tol, shape = 4 * torch.finfo(dtype).eps, f"N={tokens} size={size} {str(dtype)[6:]}"
    outputs = [torch.full_like(states, 7.5) for _ in range(2)]
    yield Call(dense.rms_norm, shape, (states, weight, 1e-5, 0.0), (outputs[0],), 2 * states.nbytes + weight.nbytes, tol=tol)
    yield Call(
        dense.add_rms_norm,
        shape,
        (states, update, weight, 1e-5, 1.0),
        (outputs[0], outputs[1]),
        4 * states.nbytes + weight.nbytes,
        tol=tol,
    )
    for activation in dense.Activation:
        yield Call(dense.activate_and_mul, f"{shape} {activation.name}", (wide, int(activation)), (outputs[0],), 3 * states.nbytes, tol=tol)
    yield wide_product(device, min(tokens, 16), size, dtype if dtype.itemsize == 2 else torch.float16)
    slots, weights = torch.arange(tokens, device=device) % 3, torch.randn(3, 80, size, generator=rng).mul(size**-0.5).to(device, dtype)
    weights[0], base = 0, wide[:, :80].contiguous()
    output, read = base.clone(), states.nbytes + min(2, tokens - 1) * weights[0].nbytes + 2 * base.nbytes
    yield Call(lora.slot_product, shape, (states, slots, weights, base), (output,), read, tol=_sum_tolerance(dtype, size))
    yield from _expert_calls(device, tokens, size, dtype)
    yield from _packed_calls(device, tokens, size, dtype)
    yield from _slot_calls(device, tokens, dtype)
    yield write_emission(device, tokens, 3)
    yield count_output(device, tokens, 3)
    yield keep_skipped(device, tokens, 3)


def wide_product(device: torch.device, tokens: int, size: int, dtype: torch.dtype) -> Call:
    """A product with the weight of a vocabulary that is not a whole number of tiles."""
    rng, inner, outer = torch.Generator().manual_seed(tokens), -(-size // 128) * 128, 32_013
    states = torch.randn(tokens, inner, generator=rng).to(device, dtype)
    weight = torch.randn(37, inner, generator=rng).mul(inner**-0.5).repeat(-(-outer // 37), 1)[:outer].to(device, dtype)
    output = torch.full((tokens, outer), 7.5, dtype=dtype, device=device)
    read, tol = weight.nbytes + states.nbytes + output.nbytes, _sum_tolerance(dtype, inner)
    return Call(dense.product, f"N={tokens} size={inner} {str(dtype)[6:]}", (states, weight, None), (output,), read, tol=tol)


def _sum_tolerance(dtype: torch.dtype, terms: int) -> float:
    """Tolerance of a sum of products: a different order of float32 sums changes about the square root of `terms` roundings."""
    return 16 * torch.finfo(dtype).eps + 2 * math.sqrt(terms) * torch.finfo(torch.float32).eps


def _expert_calls(device: torch.device, tokens: int, size: int, dtype: torch.dtype) -> Iterator[Call]:
    """Two of eight experts for each token. Least bytes: states, results, and the weights of the experts that are taken."""
    rng = torch.Generator().manual_seed(tokens)
    logits, states = torch.randn(tokens, 8, generator=rng).to(device, dtype), torch.randn(tokens, size, generator=rng).to(device, dtype)
    weights, biases = torch.randn(8 * 96, size, generator=rng).mul(size**-0.5).to(device, dtype), logits.new_zeros(8 * 96)
    tol, shape = 4 * torch.finfo(dtype).eps, f"N={tokens} size={size} {str(dtype)[6:]}"
    sum_tol = _sum_tolerance(dtype, size)
    shares, chosen = map(Tensor.contiguous, experts.choose_experts.reference(logits, 2, True))
    yield Call(experts.choose_experts, shape, (logits, 2, True, None, 1, 1, 1.0), (shares.clone(), chosen.clone()), logits.nbytes, tol=tol)
    wide, correction = torch.randn(tokens, 256, generator=rng).to(device), torch.randn(256, generator=rng).to(device) / 8
    outputs = torch.empty(tokens, 8, device=device), torch.empty(tokens, 8, dtype=torch.int64, device=device)
    yield Call(experts.choose_experts, f"grouped {shape}", (wide, 8, True, correction, 8, 4, 2.5), outputs, wide.nbytes, tol=1e-6)
    output, read = states.new_empty(2 * tokens, 96), states.nbytes + len(chosen.unique()) * weights.nbytes // 8
    yield Call(experts.expert_product, shape, (states, chosen, weights, 8, biases), (output,), read + output.nbytes, tol=sum_tol)
    parts = torch.cat([states, states.flip(0)])
    yield Call(experts.combine_experts, shape, (parts, shares), (torch.empty_like(states),), parts.nbytes + states.nbytes, tol=tol)


def random_weight(device: torch.device, name: str, outer: int, inner: int) -> Tensor:
    """Packed weights of a kind, of three different tiles."""
    kind, rng = quantised.KINDS[name], torch.Generator().manual_seed(inner)
    stored = torch.randint(0, 120, (48, inner), generator=rng) % (1 << kind.bits) - kind.zero
    scales, minimums = (torch.rand(48, inner // kind.group, generator=rng).mul(inner**-0.5).half().float() for _ in range(2))
    packed = quantised.pack(kind, quantised.Grouped(stored, scales / 128, -minimums / 2 if kind.ranged else None))
    return packed.repeat(-(-outer // 48), 1, 1)[: outer // quantised.TILE].contiguous().to(device)


def _packed_calls(device: torch.device, tokens: int, size: int, dtype: torch.dtype) -> Iterator[Call]:
    """Square matrices, rounded up to whole groups, of three different tiles. Least bytes: states, results and weights once each."""
    rng, size = torch.Generator().manual_seed(size), -(-size // 128) * 128
    states, indices = torch.randn(tokens, size, generator=rng).to(device, dtype), torch.arange(tokens, device=device) * 31 % size
    for name in ("Q4_1", "Q6_K", "INT4_128", "FP8"):
        weight = random_weight(device, name, size, size)
        tol, shape = _sum_tolerance(dtype, size), f"N={tokens} size={size} {name} {str(dtype)[6:]}"
        output, read = torch.full_like(states, 7.5), weight.nbytes + 2 * states.nbytes
        yield Call(dense.product, shape, (states, weight, None), (output,), read, tol=tol)
        chosen = torch.arange(2 * tokens, device=device).view(tokens, 2) % 3  # of three experts with a third of the columns each
        third = weight[: len(weight) // 3 * 3]
        output = states.new_empty(2 * tokens, len(third) // 3 * quantised.TILE)
        read = states.nbytes + len(chosen.unique()) * third.nbytes // 3 + output.nbytes
        yield Call(experts.expert_product, shape, (states, chosen, third, 3, None), (output,), read, tol=tol)
        read = tokens * weight[0].nbytes // quantised.TILE + states.nbytes
        yield Call(quantised.quantised_rows, shape, (indices, weight, dtype), (torch.full_like(states, 7.5),), read)


def _slot_calls(device: torch.device, tokens: int, dtype: torch.dtype) -> Iterator[Call]:
    rng = torch.Generator().manual_seed(tokens)
    lengths = torch.randint(0, 900, (tokens,), generator=rng)
    ids, live, count = torch.randint(-1, 99, (tokens, 4), generator=rng), lengths % 5 > 0, lengths % 5
    tables = torch.randint(1, 900, (tokens, 64), generator=rng).to(device)
    inputs = (ids.to(device), lengths.to(device), (lengths + 3).to(device), tables, -1, PAGE, 64 * PAGE, live.to(device), count.to(device))
    yield Call(slot_mapping.place_tokens, f"B={tokens} Q=4", inputs, tuple(filler(device, tokens, 4) for _ in range(3)))
    positions, slots = (lengths[:, None] + torch.arange(4)).to(device), torch.randint(0, 99, (tokens, 4), generator=rng).to(device)
    outputs = tuple(filler(device, tokens, 4) for _ in range(2))
    yield Call(slot_mapping.shift_entries, f"B={tokens} Q=4", (positions, slots, tables, PAGE, 1), outputs)
    row_masks = torch.randint(-9, 9, (tokens, 2, 300), generator=rng, dtype=torch.int32).to(device)
    row_tags = torch.randint(0, 2, (tokens, 2, TAG_FIELDS), generator=rng).to(device)
    rows, filled = torch.randperm(tokens, generator=rng).to(device), (row_tags[:, 0].clone(), row_masks[:, 0].clone())
    scattered = (rows, *filled, row_tags, row_masks, rows + 7, torch.zeros_like(rows))
    yield Call(host_nodes.scatter_masks, f"B={tokens}", scattered, (), writes=(3, 4, 6))
    stored = (scattered[0], ids.to(device), filler(device, tokens, 4), filler(device, tokens))
    yield Call(drafting.store_drafts, f"B={tokens} K=4", stored, (), writes=(2, 3))
    masks, status, alive = row_masks[:, 0], row_tags[:, 0, 3].clone(), live.to(device)
    chosen = (stored[1][:, 0].clone(), alive, ~alive, lengths.to(device), 2, rows, filler(device, 4, tokens), stored[1].clone())
    rule = (stored[1][:, 2].clone(), masks, alive, status)
    flags = torch.zeros(tokens, 4, dtype=torch.bool, device=device)
    legal, statuses, forced = row_masks.repeat(1, 2, 1), row_tags[:, :1, 3].repeat(1, 4), ids.flip(0).T.contiguous().to(device)
    chains = (stored[1], alive.long(), lengths.to(device), 99, rows, legal, alive, statuses, forced, flags)
    yield Call(proposing.choose_chain, f"B={tokens} K=4", chains, (filler(device, tokens, 4),), writes=(9,))
    texts = (rows, stored[1], count.clamp(max=4).to(device), lengths.to(device), torch.zeros(tokens, 904, dtype=torch.int32, device=device))
    yield Call(proposing.append_tokens, f"B={tokens} Q=4", texts, (), writes=(4,))
    text = torch.randint(-1, 3, (tokens, 900), generator=rng, dtype=torch.int32).to(device)
    searched = (text, lengths.clamp(min=1).to(device), live.long().to(device), 500, 4, 8, 1)
    yield Call(proposing.look_up, f"B={tokens} K=4", searched, (filler(device, tokens, 4),))
    written = (flags.clone(), flags.clone(), flags.clone())
    yield Call(drafting.select_draft, f"B={tokens}", (*chosen, *rule, *written), (filler(device, tokens),), writes=(6, 7, 12, 13, 14))
    frequencies = (500_000.0 ** -(torch.arange(64) / 64)).to(device)
    angles = tuple(torch.full((tokens * 4, 1, 128), 7.5, dtype=dtype, device=device) for _ in range(2))
    tol = 4 * torch.finfo(dtype).eps
    yield Call(
        slot_mapping.rope_angles, f"N={tokens * 4} {str(dtype)[6:]}", (positions.flatten() * 90, frequencies, dtype, 1.0), angles, tol=tol
    )


def write_emission(device: torch.device, batch: int, k: int) -> Call:
    """Permuted rows, of which every third is inert."""
    rng = torch.Generator().manual_seed(batch + k)

    def pick(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=rng)

    state, rows = pick(90, batch, len(Column)), torch.randperm(batch + 2, generator=rng)[:batch]
    state[:, Column.FINISH] = torch.where(torch.arange(batch) % 3 == 2, 4, int(FinishCode.RUNNING))
    inputs = (rows, state, pick(99, batch, k + 1), pick(5, batch, k + 1), pick(99, batch, k), pick(k + 2, batch), pick(k + 1, batch))
    written = (pick(6, batch), pick(9, batch + 2, len(Column)), pick(9, batch, ResultLayout(k).width))
    flags = (pick(2, batch + 2, k + 1).bool(), pick(2, batch + 2, k + 1).bool())
    outputs = (filler(device, batch), filler(device, batch), filler(device, batch, len(Column)))
    arguments = tuple(each.to(device) for each in (*inputs, *written, *flags))
    return Call(stages.write_emission, f"B={batch} K={k}", arguments, outputs, writes=(8, 9))


def count_output(device: torch.device, batch: int, k: int) -> Call:
    """Permuted rows; some emit nothing, some the same token several times."""
    rng = torch.Generator().manual_seed(batch + k)
    rows, tokens = torch.randperm(batch + 2, generator=rng)[:batch], torch.randint(0, 5, (batch, k + 1), generator=rng)
    emitted, counts = torch.arange(batch) % (k + 2), torch.randint(0, 9, (batch + 2, 5), generator=rng, dtype=torch.int32)
    inputs = tuple(each.to(device) for each in (rows, tokens, emitted, counts))
    return Call(sampled_stages.count_output, f"B={batch} K={k}", inputs, (), writes=(3,))


def keep_skipped(device: torch.device, batch: int, k: int) -> Call:
    """Permuted rows with room for all tokens; features of a wider tensor, and of more than one tile."""
    rng, room, width = torch.Generator().manual_seed(batch + k), 32, 1100
    rows, state = torch.randperm(batch + 2, generator=rng)[:batch], torch.randint(0, room - k, (batch, 3), generator=rng)
    tokens, emitted = torch.randint(0, 99, (batch, k + 1), generator=rng), torch.arange(batch) % (k + 2)
    rows, state, tokens, emitted = (each.to(device) for each in (rows, state, tokens, emitted))
    features = torch.randn(batch, k + 1, 2 * width, generator=rng).to(device, torch.bfloat16)[:, :, width:]
    row_features = torch.zeros(batch + 2, room, width, dtype=torch.bfloat16, device=device)
    inputs = (
        rows,
        state[:, 1],
        tokens,
        emitted,
        features,
        filler(device, batch + 2, room),
        row_features,
        filler(device, batch + 2, 3)[:, 2],
    )
    return Call(proposing.keep_skipped, f"B={batch} K={k}", inputs, (), writes=(5, 6, 7))
