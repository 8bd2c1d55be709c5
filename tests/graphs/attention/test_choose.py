"""The choice of an attention implementation, the probe that rejects wrong ones, and the tables that FlashInfer receives."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stepgraph import Engine, EngineConfig
from stepgraph.graphs.attention.choose import Probe, choose_attention, find_difference
from stepgraph.graphs.attention.paged import AttentionChoice, attention
from stepgraph.graphs.attention.reference import by_reference
from stepgraph.graphs.attention.row_tables import RowTables
from stepgraph.graphs.model import AttentionShape
from stepgraph.graphs.model_call import Attend, ModelInput
from stepgraph.runtime import build
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import LlamaConfig
from stepgraph.sampling.kernels import triton as programs
from stepgraph.sampling.native import why_not
from tools.random_weights import randomised

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = AttentionShape(torch.bfloat16, 6, 2, 64, (None, 40))
Change = Callable[[ModelInput, int], tuple[ModelInput, int]]


def changed(change: Change) -> Attend:
    """The reference implementation with changed inputs and window."""

    def attend(query: Tensor, keys: Tensor, values: Tensor, inputs: ModelInput, window: int, scale: float, output: Tensor) -> None:
        inputs, window = change(inputs, window)
        by_reference(query, keys, values, inputs, window, scale, output)

    return attend


def from_tables(planned: list[int], tables: RowTables, page_size: int, query: Tensor, keys: Tensor, values: Tensor) -> list[Any]:
    """How FlashInfer reads the tables of a round: per request the start of its output, its queries, and its keys and values.

    The start is that of the plan; a request without queries in the plan is not run. Lengths are read at run time.
    """
    starts, kv_indptr, pages, last = (part.tolist() for part in (tables.qo_indptr, tables.kv_indptr, tables.pages, tables.last_page))
    found = []
    for request in range(len(last)):
        own = pages[kv_indptr[request] : kv_indptr[request + 1]]
        length = (len(own) - 1) * page_size + last[request] if own else 0
        slots = [page * page_size + entry for page in own for entry in range(page_size)][:length]
        if planned[request] < planned[request + 1]:
            found.append((planned[request], query[starts[request] : starts[request + 1]], keys[slots], values[slots]))
    return found


def attend_by_tables(made: dict[tuple[int, int], RowTables]) -> Attend:
    """Queries are at the end of their request's keys, and attend to keys within the window."""

    def attend(query: Tensor, keys: Tensor, values: Tensor, inputs: ModelInput, window: int, scale: float, output: Tensor) -> None:
        batch, count, heads, size = query.shape
        pages, groups = inputs.block_tables.shape[1], heads // keys.shape[1]
        tables = made.setdefault((batch, count), RowTables(CPU, batch, count, pages, inputs.page_size))
        planned = RowTables(CPU, batch, count, pages, inputs.page_size).qo_indptr.tolist()
        tables.write(inputs)
        flat = output.zero_().view(-1, heads, size)
        for start, queries, key, value in from_tables(planned, tables, inputs.page_size, query.flatten(0, 1), keys, values):
            if not len(queries):
                continue
            key, value = (part.float().repeat_interleave(groups, 1) for part in (key, value))
            position, index = len(key) - len(queries) + torch.arange(len(queries))[:, None], torch.arange(len(key))
            seen = (index <= position) & (index >= position - (window - 1 if window else len(key)))
            scores = torch.einsum("qhd,khd->hqk", queries.float() * scale, key).masked_fill(~seen, float("-inf"))
            flat[start : start + len(queries)] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(output.dtype)

    return attend


@pytest.mark.parametrize("page_size", [16, 64])
def test_tables_of_a_round_describe_its_rows(page_size: int) -> None:
    """Dead rows, inert tails and rows that end with a page, with tables left over from the previous round."""
    made: dict[tuple[int, int], RowTables] = {}
    assert find_difference(lambda: attend_by_tables(made), lambda first, count: None, SHAPE, page_size, CPU) == ""
    assert list(made) == [(4, 5)]
    assert all(part.dtype is torch.int32 for part in vars(made[4, 5]).values())


def test_tables_of_a_padded_chunk_whose_first_entry_is_shared() -> None:
    """The first entry is a query without a slot of its own; the last two positions are inert."""
    probe = Probe(SHAPE, 16, CPU)
    probe.fill_cache((0, 52, 0, 0))
    query, inputs = probe.prompt(47, 7)
    inputs.slots[0, [0, 5, 6]] = torch.tensor([47, 52, 53]) % 16
    choices = (attend_by_tables({}), by_reference)
    tabled, expected = (attention(query, probe.cache[0], probe.cache[1], inputs._replace(attend=each)) for each in choices)
    torch.testing.assert_close(tabled[:, :5], expected[:, :5], rtol=2e-2, atol=2e-2)


def forgetful() -> Attend:
    first: list[ModelInput] = []

    def of_the_first(inputs: ModelInput, window: int) -> tuple[ModelInput, int]:
        first.append(inputs._replace(positions=inputs.positions.clone(), slots=inputs.slots.clone()))
        return first[0], window

    return changed(of_the_first)


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (changed(lambda inputs, window: (inputs._replace(positions=inputs.positions + 1), window)), "7, 300, 0, 64"),
        (changed(lambda inputs, window: (inputs._replace(slots=inputs.slots.clamp(min=16)), window)), "7, 300, 0, 64"),
        (changed(lambda inputs, window: (inputs, max(window - 1, 0))), "in a window of 40"),
        (forgetful(), "300, 6, 65, 0"),
    ],
    ids=["one key too many", "inert positions treated as live", "window too narrow", "lengths of the first round reused"],
)
def test_probe_finds_wrong_rounds(attend: Attend, reason: str) -> None:
    found = find_difference(lambda: attend, lambda first, count: None, SHAPE, 16, CPU)
    assert found.startswith("its rounds differ from the reference") and reason in found


def test_probe_finds_wrong_prompts() -> None:
    def from_the_start(first: int, count: int) -> Attend:
        return changed(lambda inputs, window: (inputs._replace(positions=inputs.positions - first), window))

    assert find_difference(lambda: None, from_the_start, SHAPE, 16, CPU) == "its prompts differ from the reference for 150 tokens after 37"
    assert find_difference(lambda: None, lambda first, count: by_reference, SHAPE._replace(dtype=torch.float16), 32, CPU) == ""


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), triton: bool = True, flashinfer: bool = True) -> None:
    """Pretend that a GPU exists, with or without these packages; nothing runs on it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(programs, "why_no_triton", lambda device: "" if triton else f"planted for {device}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if flashinfer else None)


@pytest.mark.parametrize(
    ("name", "shape", "machine", "reason"),
    [
        ("triton", SHAPE, {"triton": False}, "planted for cuda"),
        ("triton", SHAPE, {"capability": (7, 5)}, "it needs compute capability 8.0, this GPU has 7.5"),
        ("triton", SHAPE._replace(dtype=torch.float32), {}, "it supports bfloat16 and float16, not float32"),
        ("triton", SHAPE._replace(size=320), {}, "it supports head sizes up to 256, not 320"),
        ("flashinfer", SHAPE, {"flashinfer": False}, "flashinfer is not installed: pip install 'stepgraph[cuda]'"),
        ("flashinfer", SHAPE._replace(size=96), {}, "it supports head sizes 64, 128, 256, not 96"),
        ("flashinfer", SHAPE._replace(float8=True), {}, "it does not read 8-bit caches here"),
        ("flashinfer", None, {}, "no model of the engine declares its attention in `attends`"),
    ],
)
def test_unavailable_implementation_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: AttentionShape | None, machine: dict[str, Any], reason: str
) -> None:
    gpu(monkeypatch, **machine)
    shapes = () if shape is None else (SHAPE._replace(size=64), shape)
    refusal = f"attention: got '{name}', expected an implementation that runs on cuda: {reason}"
    with pytest.raises(ValueError, match=f"^{re.escape(refusal)}$"):
        choose_attention(CUDA, name, shapes, 16)
    chosen = choose_attention(CUDA, "auto", shapes, 16)
    assert name not in (chosen.rounds, chosen.prompts)
    assert shape is None or f"no {name}: {reason}" in chosen.unavailable


def test_auto_chooses_among_available_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, flashinfer=False)
    assert str(choose_attention(CUDA, "auto", (SHAPE,), 16)) == (
        "triton; no flashinfer: flashinfer is not installed: pip install 'stepgraph[cuda]'"
    )
    assert choose_attention(CUDA, "auto", (SHAPE,), 16).prompt_attend(0, 3) is None
    assert choose_attention(CUDA, "auto", (SHAPE,), 16).chunk_attend() is None
    plain = choose_attention(CUDA, "auto", (SHAPE._replace(dtype=torch.float32),), 16)
    assert (plain.rounds, plain.prompts) == ("reference", "reference")
    assert plain.round_attend() is by_reference and plain.prompt_attend(0, 3) is by_reference
    assert choose_attention(CUDA, "auto", (), 16) == choose_attention(CPU, "auto", (), 16) == AttentionChoice()
    assert str(choose_attention(CPU, "auto", (SHAPE,), 16)) == (f"reference; no native: {why_not()}" if why_not() else "native")
    half = choose_attention(CPU, "auto", (SHAPE, SHAPE._replace(dtype=torch.float16)), 16)
    assert str(half) == f"reference; no native: {why_not() or 'it supports float32 and bfloat16, not float16'}"
    assert choose_attention(CPU, "reference", (SHAPE,), 16).round_attend() is by_reference


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="needs an environment without flashinfer")
def test_broken_package_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch)
    chosen = choose_attention(CUDA, "auto", (SHAPE,), 16)
    assert str(chosen) == "triton; no flashinfer: ModuleNotFoundError: No module named 'flashinfer'"
    with pytest.raises(ValueError, match="runs on cuda: ModuleNotFoundError"):
        choose_attention(CUDA, "flashinfer", (SHAPE,), 16)


def test_engine_refuses_an_unavailable_implementation() -> None:
    with pytest.raises(
        ValueError, match=r"EngineConfig\.attention: got 'fast', expected one of 'auto', 'flashinfer', 'triton', 'reference'"
    ):
        EngineConfig(attention="fast")  # type: ignore[arg-type]
    target = randomised(Llama(LlamaConfig(50, 32, 48, 4, 2, 8, (None, 6))))
    for expected in ("triton", "flashinfer"):
        config = EngineConfig(attention=expected, num_speculative_tokens=0, max_length=32)
        refusal = rf"EngineConfig\.attention: got '{expected}', expected an implementation that runs on cpu: .* not on cpu"
        with pytest.raises(ValueError, match=refusal):
            Engine(target, config=config)
    config = EngineConfig(attention="reference", num_speculative_tokens=0, max_length=32, max_rows=1, greedy_only=True)
    with Engine(target, config=config) as engine:
        assert "attention: reference" in engine.capture().notes
        assert len(engine.generate([1, 2, 3], max_new_tokens=5).tokens) == 5


class Draft(Llama):
    d2t = None


def watched(calls: list[tuple[int, int]]) -> AttentionChoice:
    """The reference. Checks that each plan is made for the tokens of its call. Appends (first, count), or (-1, 0) for a round."""

    def round_attend() -> Attend | None:
        calls.append((-1, 0))
        return by_reference

    def prompt_attend(first: int, count: int) -> Attend | None:
        calls.append((first, count))

        def attend(query: Tensor, keys: Tensor, values: Tensor, inputs: ModelInput, *others: Any) -> None:
            assert inputs.positions.tolist() == [list(range(first, first + count))]
            by_reference(query, keys, values, inputs, *others)

        return attend

    return AttentionChoice("reference", "reference", (), round_attend, prompt_attend)


def test_each_model_call_is_planned_for_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = LlamaConfig(50, 32, 48, 4, 2, 8, (None, 6))
    target, draft = randomised(Llama(sizes)), randomised(Draft(sizes, name="draft"), 1)
    assert isinstance(draft, Draft)
    config = EngineConfig(
        max_rows=1, num_speculative_tokens=2, draft_length=2, max_length=32, page_size=4, prefill_chunk=6, greedy_only=True
    )
    texts, calls = [], list[tuple[int, int]]()
    for watching in (False, True):
        if watching:
            monkeypatch.setattr(build, "choose_attention", lambda *_: watched(calls))
        with Engine(target, draft, config=config) as engine:
            engine.capture()
            assert watching == bool(calls)
            texts.append([engine.generate(list(range(1, length + 1)), max_new_tokens=4).tokens for length in (14, 1)])
    assert texts[0] == texts[1]
    rounds, prompts = ([call for call in calls if call[0] < 0], [call for call in calls if call[0] >= 0])
    # verify, and two drafts: in graphs with and without grammars, and again in the first one, as the draft model is from another package
    assert len(rounds) == 3 * 3
    # 13 of 14 prompt tokens, in chunks of 6; the first chunk of the draft model has 7 tokens, so it stays one token ahead.
    assert prompts == [(0, 6), (0, 7), (6, 6), (7, 6), (12, 1), (13, 1), (0, 1)]
