"""The filter operations: values, registration, the tape, and the choice of an implementation per device."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from stepgraph import Engine, EngineConfig
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.sampling import kernels, rng, sampler
from stepgraph.sampling.kernels import filters
from stepgraph.sampling.kernels import triton as programs
from stepgraph.sampling.rng import Purpose

PARAMS = torch.tensor([[0.7, 5, 0.9, 0.01], [0.0, 0, 1, 0], [1.3, 0, 0.8, 0]])
TRITON = "stepgraph.sampling.kernels.triton.filters"
CPU = torch.device("cpu")


def logits_of(*shape: int) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 3).round(decimals=1)


def test_operations_equal_plain_functions() -> None:
    logits = logits_of(3, 2, 110)[..., :101]
    assert torch.equal(kernels.distribution(logits, PARAMS), sampler.distribution(logits, PARAMS))
    seed, position = torch.arange(3), torch.arange(3) + 5
    ids = torch.randperm(300, generator=torch.Generator().manual_seed(2))[:101]
    rows = torch.tensor([4, 0, 2])
    for own, width in ((None, 101), (ids, 300)):
        table = torch.zeros(5, 2, width)
        token = kernels.draw(logits[:, 0], PARAMS, seed, position, Purpose.DRAFT, rows, table[:, 1], own)
        expected = sampler.distribution(logits[:, 0], PARAMS)
        if own is not None:
            expected = torch.zeros(3, 300).index_copy(1, own, expected)
        noise = rng.exponential(seed[:, None], position[:, None], Purpose.DRAFT, torch.arange(width))
        assert torch.equal(table[rows, 1], expected) and torch.equal(token, (expected / noise).argmax(-1))
        assert not table[:, 0].any() and not table[[1, 3]].any(), "of other rows and drafts"
    dead = kernels.draw(torch.full((1, 9), -torch.inf), PARAMS[:1], seed[:1], position[:1], Purpose.DRAFT, rows[1:2], torch.zeros(1, 9))
    assert dead.tolist() == [0]


def test_arguments_of_wrong_shapes_are_refused() -> None:
    logits, numbers = logits_of(3, 2, 33), torch.arange(3)
    with pytest.raises(AssertionError, match="params"):
        kernels.distribution(logits, PARAMS[:2])
    for width, ids in ((34, None), (32, None), (40, torch.arange(32)), (20, torch.arange(33))):
        with pytest.raises(AssertionError, match="row_probs"):
            kernels.draw(logits[:, 0], PARAMS, numbers, numbers, Purpose.DRAFT, numbers, torch.zeros(3, width), ids)


@pytest.fixture
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """No implementation is chosen, and Triton can run."""
    monkeypatch.setattr(filters, "_chosen", {})
    monkeypatch.setattr(programs, "why_no_triton", lambda device: "")


@pytest.mark.usefixtures("_forgetful")
class TestChoice:
    def test_cpu_uses_torch_and_reports_the_reason(self) -> None:
        choice = kernels.choose_filters("cpu")
        assert choice.name == "torch" and filters.filter_module(CPU) == ""
        assert str(choice) == "torch; no triton: it runs on CUDA devices, not on cpu; no flashinfer: it runs on CUDA devices, not on cpu"

    def test_missing_libraries_are_not_chosen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "flashinfer", None)
        monkeypatch.delitem(sys.modules, "stepgraph.sampling.kernels.flashinfer", raising=False)
        assert kernels.choose_filters("cuda:0") == ("triton", ())
        assert filters.filter_module(torch.device("cuda:0")) == TRITON
        assert filters.filter_module(torch.device("cuda:1")) == TRITON, "the default"
        monkeypatch.setattr(programs, "why_no_triton", lambda device: f"planted for {device}")
        choice = kernels.choose_filters("cuda:0")
        assert choice.name == "torch" and "no triton: planted for cuda:0; no flashinfer: ModuleNotFoundError" in str(choice)
        assert filters.filter_module(torch.device("cuda:0")) == "", "the reference"

    def test_flashinfer_that_fails_its_probe_is_not_chosen(self, stand_in: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(programs, "why_no_triton", lambda device: "planted")
        for reason, name in (("", "flashinfer"), ("it keeps other tokens", "torch")):
            monkeypatch.setattr(filters, "find_difference", lambda *_, why=reason: why)
            assert kernels.choose_filters("cuda:0").name == name
        assert kernels.choose_filters("cuda:0").unavailable == ("no triton: planted", "no flashinfer: it keeps other tokens")

    def test_error_of_a_compiler_or_driver_is_reported(self, stand_in: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        def breaks(*_: object) -> str:
            raise RuntimeError("nvcc: not found\nand much more")

        monkeypatch.setattr(filters, "find_difference", breaks)
        monkeypatch.setattr(programs, "why_no_triton", lambda device: "planted")
        assert kernels.choose_filters("cuda:0").unavailable == ("no triton: planted", "no flashinfer: RuntimeError: nvcc: not found")

    def test_unavailable_implementation_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"got 'triton', expected an implementation that runs on cpu: it runs on CUDA devices"):
            kernels.choose_filters("cpu", "triton")
        with pytest.raises(ValueError, match=r"EngineConfig.filters: got 'fast', expected one of 'auto', 'triton', 'flashinfer', 'torch'"):
            EngineConfig(filters="fast")  # type: ignore[arg-type]
        target = ToyTarget(32)
        engine = Engine(target, ToyDraft(target), config=EngineConfig(filters="flashinfer", max_length=64))
        with pytest.raises(ValueError, match=r"EngineConfig.filters: got 'flashinfer', expected an implementation that runs on cpu"):
            engine.capture()
        engine.close()

    def test_capture_report_names_the_choice(self) -> None:
        target = ToyTarget(32)
        for greedy_only in (False, True):
            config = EngineConfig(max_rows=1, num_speculative_tokens=1, draft_length=1, max_length=64, greedy_only=greedy_only)
            engine = Engine(target, ToyDraft(target), config=config)
            notes = engine.capture().notes
            engine.close()
            assert f"kernels: {kernels.describe('cpu')}" in notes
            assert any(note.startswith("filters: torch; no triton: ") for note in notes) != greedy_only


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module flashinfer.sampling with the two documented functions in plain torch."""
    package, module = ModuleType("flashinfer"), ModuleType("flashinfer.sampling")

    def top_k_mask_logits(logits: Tensor, top_k: Tensor) -> Tensor:
        least = logits.sort(-1, descending=True).values.gather(1, top_k.long()[:, None] - 1)
        return torch.where(logits >= least, logits, -torch.inf)

    def top_p_renorm_probs(probs: Tensor, top_p: Tensor) -> Tensor:
        assert not bool(probs.isnan().any()), "FlashInfer does not return for NaN"
        assert bool(((probs.sum(-1) > 0) | (top_p >= 1)).all()), "top-p of a row without probabilities"
        ordered = probs.double().sort(-1, descending=True).values
        short = (ordered.cumsum(-1) < top_p.double()[:, None]).sum(-1, keepdim=True).clamp(max=probs.shape[1] - 1)
        kept = torch.where((probs >= ordered.gather(1, short)) | (top_p >= 1)[:, None], probs, 0.0)
        return kept / kept.sum(-1, keepdim=True).clamp(min=1e-8)

    module.__dict__.update(top_k_mask_logits=top_k_mask_logits, top_p_renorm_probs=top_p_renorm_probs)
    package.__dict__["sampling"] = module
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", module)
    monkeypatch.delitem(sys.modules, "stepgraph.sampling.kernels.flashinfer", raising=False)
    return module


def test_flashinfer_adaptor_equals_the_reference(stand_in: ModuleType) -> None:
    """With plain torch instead of FlashInfer's kernels: dead rows, greedy rows, every setting, normalisation and d2t."""
    programs = importlib.import_module("stepgraph.sampling.kernels.flashinfer")
    assert filters.find_difference(programs.distribution, CPU) == ""
    rows, seed = torch.tensor([3, 0, 1]), torch.arange(3)
    for ids, width in ((torch.randperm(300)[:101], 300), (None, 101)):
        expected, probs = torch.zeros(2, 4, width)
        required, token = torch.full((2, 3), -9)
        filters.draw.run_reference(logits_of(3, 101), PARAMS, seed, seed, Purpose.DRAFT, rows, expected, ids, required)
        programs.draw(logits_of(3, 101), PARAMS, seed, seed, Purpose.DRAFT, rows, probs, ids, token)
        assert torch.equal(probs, expected) and torch.equal(token, required)


@pytest.mark.parametrize("column", [sampler.Param.TOP_K, sampler.Param.TOP_P, sampler.Param.MIN_P, sampler.Param.TEMPERATURE])
def test_probe_finds_filters_that_ignore_a_setting(column: int) -> None:
    def forgetful(logits: Tensor, params: Tensor, probs: Tensor) -> None:
        neutral = torch.tensor([1.0, 0, 1, 0])
        probs.copy_(sampler.distribution(logits, params.clone().index_fill_(1, torch.tensor([column]), float(neutral[column]))))

    assert "it keeps other tokens than the reference" in filters.find_difference(forgetful, CPU)


def test_probe_finds_wrong_ties_and_probability_sums() -> None:
    def by_id(logits: Tensor, params: Tensor, probs: Tensor) -> None:
        expected = sampler.distribution(logits, params)
        rank = expected.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
        top_k = params[:, sampler.Param.TOP_K].view(-1, 1, 1)
        probs.copy_(torch.where((rank < top_k) | (top_k == 0), expected, 0.0))

    def unnormalised(logits: Tensor, params: Tensor, probs: Tensor) -> None:
        probs.copy_(sampler.distribution(logits, params) * 0.99)

    assert "it keeps other tokens than the reference" in filters.find_difference(by_id, CPU)
    assert "its probabilities differ from the reference" in filters.find_difference(unnormalised, CPU)
