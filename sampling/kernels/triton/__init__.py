"""Triton programs of the sampling operations. Their modules are imported only where Triton can launch."""

from __future__ import annotations

import functools
import importlib
import logging

import torch

from stepgraph.sampling.fields import error_summary

log = logging.getLogger(__name__)


@functools.cache
def why_no_triton(device: torch.device) -> str:
    """Why Triton programs cannot run on `device`; empty if they can. Decided by launching one: Triton needs a C compiler too."""
    try:
        importlib.import_module("stepgraph.sampling.kernels.triton.probe").launch(device)
    except Exception as error:  # from Triton, the C compiler, the loader or the driver
        log.warning("Triton cannot launch on %s, so kernels run as plain torch: %s", device, error_summary(error))
        return error_summary(error)
    return ""
