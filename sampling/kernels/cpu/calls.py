"""The structs of choices.h as ctypes sees them, and how the tensors of a call become one: once, where their memory stays."""

from __future__ import annotations

from ctypes import CDLL, Structure, sizeof

import torch
from torch import Tensor

from stepgraph.sampling.bitmask import WORD
from stepgraph.sampling.grammar.status import TAG_FIELDS
from stepgraph.sampling.kernels.cpu.loader import address, fields, prepared_call
from stepgraph.sampling.kernels.operation import Run

VERSION = 2  # of the structs and of what is made of them
NARROW = {torch.float32: 0, torch.bfloat16: 1}


class ArgmaxCall(Structure):
    _fields_ = tuple(
        fields(
            "logits masks rows ids status ruled best token",
            "batch places width row_step place_step mask_rows words mask_row_step mask_place_step narrow",
        )
    )


class StatusCall(Structure):
    _fields_ = tuple(
        fields(
            "tags rows owner generated constrained status",
            "batch places tag_rows row_step place_step owner_step generated_step first",
        )
    )


class ChainCall(Structure):
    _fields_ = tuple(fields("sampled finite drafts draft_count status stop_ids room known emitted accepted finish", "batch count stops"))


FUNCTIONS = {"stepgraph_masked_argmax": ArgmaxCall, "stepgraph_mask_status": StatusCall, "stepgraph_chain_accept": ChainCall}
OWN_LAYOUT = (VERSION, *map(sizeof, FUNCTIONS.values()))


def masked_argmax(
    library: CDLL,
    logits: Tensor,
    masks: Tensor,
    rows: Tensor | None,
    ruled: Tensor,
    ids: Tensor | None,
    status: Tensor | None,
    best: Tensor,
    token: Tensor,
) -> Run | None:
    tensors = tuple(each for each in (logits, masks, rows, ruled, ids, status, best, token) if each is not None)
    batch, places, width = logits.shape
    mask_rows, _, words = masks.shape
    dense = logits.stride(2) == masks.stride(2) == 1 and all(each.is_contiguous() for each in tensors[2:])
    covered = words * WORD >= width if ids is None else words > 0 and len(ids) == width
    fits = masks.shape[1] == places and (rows is not None or mask_rows == batch) and len(ruled) == batch
    if logits.dtype not in NARROW or masks.dtype is not torch.int32 or not (dense and covered and fits and width):
        return None
    addresses = map(address, (logits, masks, rows, ids, status, ruled, best, token))
    shape = (batch, places, width, *logits.stride()[:2], mask_rows, words, *masks.stride()[:2], NARROW[logits.dtype])
    return prepared_call(library.stepgraph_masked_argmax, ArgmaxCall(*addresses, *shape), tensors)


def mask_status(
    library: CDLL,
    tags: Tensor,
    rows: Tensor | None,
    owner: Tensor,
    generated: Tensor,
    constrained: Tensor,
    first: int,
    status: Tensor,
) -> Run | None:
    tensors = tuple(each for each in (tags, rows, owner, generated, constrained, status) if each is not None)
    dense = tags.stride(2) == 1 and all(each.is_contiguous() for each in (constrained, status))
    fits = tags.shape[2] == TAG_FIELDS and (rows is not None or len(tags) == len(owner))
    if not dense or not fits or not (rows is None or rows.is_contiguous()):
        return None
    addresses = map(address, (tags, rows, owner, generated, constrained, status))
    shape = (*status.shape, len(tags), *tags.stride()[:2], owner.stride(0), generated.stride(0), first)
    return prepared_call(library.stepgraph_mask_status, StatusCall(*addresses, *shape), tensors)


def chain_accept(library: CDLL, sampled: Tensor, finite: Tensor, drafts: Tensor, *others: Tensor | None) -> Run | None:
    tensors = tuple(each for each in (sampled, finite, drafts, *others) if each is not None)
    stop_ids = others[2]
    assert stop_ids is not None
    if not all(each.is_contiguous() for each in tensors):
        return None
    addresses = map(address, (sampled, finite, drafts, *others))
    struct = ChainCall(*addresses, len(sampled), drafts.shape[1], stop_ids.shape[1])
    return prepared_call(library.stepgraph_chain_accept, struct, tensors)
