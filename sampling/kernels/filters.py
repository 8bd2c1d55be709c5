"""Temperature, min-p, top-k and top-p: the distribution that a request asks for, and a token drawn from it in the same pass.

The implementation on a device is chosen once, before anything is captured, and reported with the reasons.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from stepgraph.sampling import rng, sampler
from stepgraph.sampling.cuda_graphs import capture_replay
from stepgraph.sampling.fields import check_value, error_summary, one_of
from stepgraph.sampling.kernels import triton as programs
from stepgraph.sampling.kernels.operation import Dense, DenseFloats, Longs, operation
from stepgraph.sampling.sampler import VocabColumns

FilterName = Literal["auto", "triton", "flashinfer", "torch"]
FILTER_CHOICES = get_args(FilterName)
FILTER_MODULES = {
    "flashinfer": "stepgraph.sampling.kernels.flashinfer",
    "triton": "stepgraph.sampling.kernels.triton.filters",
    "torch": "",  # the reference
}
Filter = Callable[[Tensor, Tensor, Tensor], None]  # logits [B, Q, V], params [B, 4], probs [B, Q, V], written
log = logging.getLogger(__name__)


class FilterChoice(NamedTuple):
    name: str  # flashinfer, triton or torch
    unavailable: tuple[str, ...]  # preferred implementations, and why they cannot be used

    def __str__(self) -> str:
        return "; ".join((self.name, *self.unavailable))


_chosen: dict[torch.device, FilterChoice] = {}


def choose_filters(device: torch.device | str, requested: str = "auto") -> FilterChoice:
    """Choose for `device` and keep the choice for later captures. May build FlashInfer's kernels, which takes a minute.

    auto: triton, else flashinfer where a probe on the device finds it equal to the reference, else torch; on the CPU torch.
    ValueError if another implementation is requested and cannot run.
    """
    check_value("filters", requested, one_of(FILTER_CHOICES))
    device_with_index = _with_index(torch.device(device))
    unavailable: list[str] = []
    for name in FILTER_CHOICES[1:] if requested == "auto" else (requested,):
        reason_unavailable = why_not(name, device_with_index)
        if not reason_unavailable:
            _chosen[device_with_index] = FilterChoice(name, tuple(unavailable))
            return _chosen[device_with_index]
        unavailable.append(f"no {name}: {reason_unavailable}")
    raise ValueError(f"filters: got {requested!r}, expected an implementation that runs on {device_with_index}: {reason_unavailable}")


def filter_module(device: torch.device) -> str:
    """The module whose functions run the filters on `device`: as chosen, else triton's if it can run; empty for the reference."""
    indexed = _with_index(device)
    choice = _chosen.get(indexed)
    return FILTER_MODULES[choice.name if choice else "torch" if why_not("triton", indexed) else "triton"]


def why_not(name: str, device: torch.device) -> str:
    """Why the filters cannot run as `name` on `device`; empty if they can."""
    if name == "torch":
        return ""
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device.type}"
    if name == "triton":
        return programs.why_no_triton(device)
    try:
        module = importlib.import_module(FILTER_MODULES[name])
        log.warning("building or loading FlashInfer's sampling kernels for %s; the first time takes a minute or two", device)
        return find_difference(module.distribution, device)
    except Exception as error:  # from a compiler, a loader or a driver
        return error_summary(error)


def probe_inputs(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Logits and params that expose faults of filters: many ties, odd and large widths, dead rows, every setting alone and together."""
    rows = [
        [1.0, 0, 1, 0],
        [0.7, 5, 1, 0],
        [1.0, 0, 0.9, 0],
        [1.3, 50, 0.5, 0.01],
        [0.0, 0, 1, 0],
        [1.0, 1, 1e-6, 0],
        [2.0, 2**24, 0.999, 1.0],
    ]
    cases = []
    for seed, width in enumerate((33, 4_099, 131_071, 151_936)):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(len(rows), 2, width, generator=generator) * 4
        logits[:, 0].round_()
        logits[:, 1, width // 3 :] = float("-inf")
        logits[1, 0], logits[2, 1], logits[3, 1, 7] = float("-inf"), 0.0, float("nan")
        cases.append((logits.to(device), torch.tensor(rows, device=device)))
    return cases


def find_difference(run: Filter, device: torch.device) -> str:
    """How the tokens that `run` keeps, or their probabilities, differ from the reference, also in replays after settings changed; empty if
    they do not."""
    for logits, params in probe_inputs(device):
        expected, probs = sampler.distribution(logits, params), torch.full(logits.shape, -1.0, device=device)
        run(logits, params, probs)
        wrong = ((probs > 0) != (expected > 0)).sum()
        if wrong:
            return f"it keeps other tokens than the reference: {int(wrong)} of a probe of {logits.shape[-1]} tokens differ"
        if not torch.allclose(probs, expected, rtol=1e-5, atol=0):
            return f"its probabilities differ from the reference in a probe of {logits.shape[-1]} tokens"
    replay = capture_replay(lambda: run(logits, params, probs), device)
    for _ in range(2):
        params.copy_(params.roll(1, 0))
        replay()
        if not torch.equal(probs > 0, sampler.distribution(logits, params) > 0):
            return "its replay in a CUDA graph keeps other tokens than the reference"
    return ""


def _with_index(device: torch.device) -> torch.device:
    """The device with an index, as in Tensor.device."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def race(weights: Tensor, seed: Tensor, position: Tensor, purpose: int, columns: VocabColumns = sampler.ALL_COLUMNS) -> Tensor:
    """Tokens [N] drawn by exponential race: token t with probability weights[t] / weights.sum(), of weights [N, V]. The noise is
    rng.exponential(seed, position, purpose, token) of seed, position [N]."""
    noise = rng.exponential(seed[:, None], position[:, None], rng.Purpose(purpose), columns.ids(weights))
    return columns.best(weights / noise)[1].squeeze(-1)


def _check_params(logits: Tensor, params: Tensor) -> None:
    assert params.dtype is torch.float32, f"params {params.dtype}"
    assert params.shape[0] == logits.shape[0] and params.shape[1] > sampler.Param.MIN_P, f"logits {logits.shape}, params {params.shape}"


def _distribution_outputs(logits: Tensor, params: Tensor) -> Tensor:
    assert logits.dim() == 3, f"logits {logits.shape}"
    _check_params(logits, params)
    return torch.empty(logits.shape, dtype=torch.float32, device=logits.device)


@operation(_distribution_outputs, triton=filter_module, c=True, supports=lambda logits: logits.shape[-1] > 0)
def distribution(logits: DenseFloats, params: Dense) -> Tensor:
    """sampler.distribution of logits [B, Q, V], of any float type, and params [B, 4 or more] float32 -> [B, Q, V] float32."""
    return sampler.distribution(logits, params)


def _draw_outputs(
    logits: Tensor, params: Tensor, seed: Tensor, position: Tensor, purpose: int, rows: Tensor, row_probs: Tensor, ids: Tensor | None
) -> Tensor:
    assert logits.dim() == 2, f"logits {logits.shape}"
    _check_params(logits, params)
    width = row_probs.shape[1]
    assert row_probs.dtype is torch.float32 and row_probs.stride(1) == 1, f"row_probs {row_probs.dtype}, strides {row_probs.stride()}"
    assert logits.shape[1] == (width if ids is None else len(ids)) <= width, f"logits {logits.shape}, row_probs {row_probs.shape}"
    return torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)


def _c_supports_draw(logits: Tensor, ids: Tensor | None) -> bool:
    return logits.shape[-1] > 0 and (ids is None or bool((ids[:1] >= 0).all() and (ids.diff() > 0).all()))  # the kernel scatters in place


@operation(_draw_outputs, writes=("row_probs",), triton=filter_module, c=True, supports=_c_supports_draw)
def draw(
    logits: DenseFloats,
    params: Dense,
    seed: Longs,
    position: Longs,
    purpose: int,
    rows: Longs,
    row_probs: Tensor,
    ids: Longs | None = None,
) -> Tensor:
    """sampler.distribution of logits [N, V], written to the rows of row_probs [R, W] float32, and `race` over it: tokens [N] int64.

    rows [N] int64. With `ids` [V] int64 the logits belong to those tokens of a vocabulary of W: probabilities are written at these
    ids, the other columns have to be zeros already, and each token races with the noise of its id. Without a finite best logit the
    token is 0.
    """
    probs = sampler.distribution(logits, params)
    if ids is not None:
        probs = torch.zeros(len(logits), row_probs.shape[1], device=logits.device).index_copy_(1, ids, probs)
    row_probs.index_copy_(0, rows, probs)
    return race(probs, seed, position, purpose)
