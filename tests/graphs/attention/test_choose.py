"""What attention runs as: the choice and its reasons, the probe that finds what is wrong, and what FlashInfer is told of a round."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stepgraph import Engine, EngineConfig
from stepgraph.graphs.attention.choose import choose_attention, differs
from stepgraph.graphs.attention.paged import AttentionChoice, AttentionShape, by_reference
from stepgraph.graphs.attention.row_tables import RowTables
from stepgraph.graphs.model import Attend, ModelInput
from stepgraph.runtime import build
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import LlamaConfig
from stepgraph.sampling.kernels import operation

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = AttentionShape(torch.bfloat16, 6, 2, 64, (None, 40))
Change = Callable[[ModelInput, int], tuple[ModelInput, int]]


def changed(change: Change) -> Attend:
    """The reference, over other inputs and another window."""

    def attend(query: Tensor, keys: Tensor, values: Tensor, inputs: ModelInput, window: int, scale: float, output: Tensor) -> None:
        inputs, window = change(inputs, window)
        by_reference(query, keys, values, inputs, window, scale, output)

    return attend


def from_tables(planned: list[int], tables: RowTables, page_size: int, query: Tensor, keys: Tensor, values: Tensor) -> list[Any]:
    """What FlashInfer makes of the tables of a round: per request where its output stands, its queries, and its keys and values.

    A request's place in the output is its plan's, and one without queries in the plan is not run. Lengths are read when it runs.
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
    """Every query of a request stands at the end of its keys, and looks back as far as the window."""

    def attend(query: Tensor, keys: Tensor, values: Tensor, inputs: ModelInput, window: int, scale: float, output: Tensor) -> None:
        batch, count, heads, size = query.shape
        pages, groups = inputs.block_tables.shape[1], heads // keys.shape[1]
        tables = made.setdefault((batch, count), RowTables(CPU, batch, count, pages, inputs.page_size))
        planned = RowTables(CPU, batch, count, pages, inputs.page_size).qo_indptr.tolist()
        tables.write(inputs)
        flat = output.zero_().view(-1, heads, size)
        for start, asked, key, value in from_tables(planned, tables, inputs.page_size, query.flatten(0, 1), keys, values):
            if not len(asked):
                continue
            key, value = (part.float().repeat_interleave(groups, 1) for part in (key, value))
            position, place = len(key) - len(asked) + torch.arange(len(asked))[:, None], torch.arange(len(key))
            seen = (place <= position) & (place >= position - (window - 1 if window else len(key)))
            scores = torch.einsum("qhd,khd->hqk", asked.float() * scale, key).masked_fill(~seen, float("-inf"))
            flat[start : start + len(asked)] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(output.dtype)

    return attend


@pytest.mark.parametrize("page_size", [16, 64])
def test_the_tables_of_a_round_say_what_its_rows_are(page_size: int) -> None:
    """Dead rows, inert tails and rows that end with a page, over tables that the round before has left."""
    made: dict[tuple[int, int], RowTables] = {}
    assert differs(lambda: attend_by_tables(made), lambda first, count: None, SHAPE, page_size, CPU) == ""
    assert list(made) == [(4, 5)]
    assert all(part.dtype is torch.int32 for part in vars(made[4, 5]).values())


def forgetful() -> Attend:
    first: list[ModelInput] = []

    def of_the_first(inputs: ModelInput, window: int) -> tuple[ModelInput, int]:
        first.append(inputs._replace(positions=inputs.positions.clone(), slots=inputs.slots.clone()))
        return first[0], window

    return changed(of_the_first)


@pytest.mark.parametrize(
    ("attend", "told"),
    [
        (changed(lambda inputs, window: (inputs._replace(positions=inputs.positions + 1), window)), "7, 300, 0, 64"),
        (changed(lambda inputs, window: (inputs._replace(slots=inputs.slots.clamp(min=16)), window)), "7, 300, 0, 64"),
        (changed(lambda inputs, window: (inputs, max(window - 1, 0))), "in a window of 40"),
        (forgetful(), "300, 6, 65, 0"),
    ],
    ids=["one key too many", "inert positions count", "a narrow window", "the lengths of its first round"],
)
def test_the_probe_finds_wrong_rounds(attend: Attend, told: str) -> None:
    found = differs(lambda: attend, lambda first, count: None, SHAPE, 16, CPU)
    assert found.startswith("its rounds are not the reference's") and told in found


def test_the_probe_finds_wrong_prompts() -> None:
    def from_the_start(first: int, count: int) -> Attend:
        return changed(lambda inputs, window: (inputs._replace(positions=inputs.positions - first), window))

    assert differs(lambda: None, from_the_start, SHAPE, 16, CPU) == "its prompts are not the reference's for 150 tokens after 37"
    assert differs(lambda: None, lambda first, count: by_reference, SHAPE._replace(dtype=torch.float16), 32, CPU) == ""


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), triton: bool = True, flashinfer: bool = True) -> None:
    """As if there were one, with or without these packages; nothing runs on it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(operation, "why_no_triton", lambda device: "" if triton else f"planted for {device}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if flashinfer else None)


@pytest.mark.parametrize(
    ("wanted", "shape", "machine", "told"),
    [
        ("triton", SHAPE, {"triton": False}, "planted for cuda"),
        ("triton", SHAPE, {"capability": (7, 5)}, "it needs compute capability 8.0, this GPU has 7.5"),
        ("triton", SHAPE._replace(dtype=torch.float32), {}, "it supports bfloat16 and float16, not float32"),
        ("triton", SHAPE._replace(size=320), {}, "it supports head sizes up to 256, not 320"),
        ("flashinfer", SHAPE, {"flashinfer": False}, "flashinfer is not installed: pip install 'stepgraph[cuda]'"),
        ("flashinfer", SHAPE._replace(size=96), {}, "it supports head sizes 64, 128, 256, not 96"),
        ("flashinfer", None, {}, "no model of the engine declares its attention in `attends`"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, wanted: str, shape: AttentionShape | None, machine: dict[str, Any], told: str
) -> None:
    gpu(monkeypatch, **machine)
    shapes = () if shape is None else (SHAPE._replace(size=64), shape)
    refusal = f"attention: got '{wanted}', expected an implementation that runs on cuda: {told}"
    with pytest.raises(ValueError, match=f"^{re.escape(refusal)}$"):
        choose_attention(CUDA, wanted, shapes, 16)
    chosen = choose_attention(CUDA, "auto", shapes, 16)
    assert wanted not in (chosen.rounds, chosen.prompts)
    assert shape is None or f"no {wanted}: {told}" in chosen.passed_over


def test_auto_takes_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, flashinfer=False)
    assert str(choose_attention(CUDA, "auto", (SHAPE,), 16)) == (
        "triton; no flashinfer: flashinfer is not installed: pip install 'stepgraph[cuda]'"
    )
    assert choose_attention(CUDA, "auto", (SHAPE,), 16).prompt_call(0, 3) is None
    plain = choose_attention(CUDA, "auto", (SHAPE._replace(dtype=torch.float32),), 16)
    assert (plain.rounds, plain.prompts) == ("reference", "reference")
    assert plain.round_call() is by_reference and plain.prompt_call(0, 3) is by_reference
    assert choose_attention(CUDA, "auto", (), 16) == choose_attention(CPU, "auto", (), 16) == AttentionChoice()
    assert str(choose_attention(CPU, "auto", (SHAPE,), 16)) == "native"
    half = choose_attention(CPU, "auto", (SHAPE, SHAPE._replace(dtype=torch.float16)), 16)
    assert str(half) == "reference; no native: it supports float32 and bfloat16, not float16"
    assert choose_attention(CPU, "reference", (SHAPE,), 16).round_call() is by_reference


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="flashinfer is installed: it does not break")
def test_a_package_that_breaks_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch)
    chosen = choose_attention(CUDA, "auto", (SHAPE,), 16)
    assert str(chosen) == "triton; no flashinfer: ModuleNotFoundError: No module named 'flashinfer'"
    with pytest.raises(ValueError, match="runs on cuda: ModuleNotFoundError"):
        choose_attention(CUDA, "flashinfer", (SHAPE,), 16)


def test_an_engine_refuses_what_it_cannot_have() -> None:
    with pytest.raises(
        ValueError, match=r"EngineConfig\.attention: got 'fast', expected one of 'auto', 'flashinfer', 'triton', 'reference'"
    ):
        EngineConfig(attention="fast")
    target = Llama(LlamaConfig(50, 32, 48, 4, 2, 8, (None, 6))).randomise()
    for wanted in ("triton", "flashinfer"):
        config = EngineConfig(attention=wanted, num_speculative_tokens=0, max_length=32)
        refusal = rf"EngineConfig\.attention: got '{wanted}', expected an implementation that runs on cpu: .* not on cpu"
        with pytest.raises(ValueError, match=refusal):
            Engine(target, config=config)
    config = EngineConfig(attention="reference", num_speculative_tokens=0, max_length=32, max_rows=1, greedy_only=True)
    with Engine(target, config=config) as engine:
        assert "attention: reference" in engine.capture().notes
        assert len(engine.generate([1, 2, 3], max_new_tokens=5).tokens) == 5


class Draft(Llama):
    d2t = None


def watched(calls: list[tuple[int, int]]) -> AttentionChoice:
    """The reference; compares what a plan is made for with the tokens of the call. `calls`: -1 and 0 for a round."""

    def round_call() -> Attend | None:
        calls.append((-1, 0))
        return by_reference

    def prompt_call(first: int, count: int) -> Attend | None:
        calls.append((first, count))

        def attend(query: Tensor, keys: Tensor, values: Tensor, inputs: ModelInput, *others: Any) -> None:
            assert inputs.positions.tolist() == [list(range(first, first + count))]
            by_reference(query, keys, values, inputs, *others)

        return attend

    return AttentionChoice("reference", "reference", (), round_call, prompt_call)


def test_every_call_of_a_model_is_planned_for_the_tokens_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = LlamaConfig(50, 32, 48, 4, 2, 8, (None, 6))
    target, draft = Llama(sizes).randomise(), Draft(sizes, name="draft").randomise(1)
    assert isinstance(draft, Draft)
    config = EngineConfig(max_rows=1, num_speculative_tokens=2, max_length=32, page_size=4, prefill_chunk=6, greedy_only=True)
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
    assert len(rounds) == 2 * 3  # graphs with and without grammars; verify, and two drafts
    # Thirteen of fourteen tokens in chunks; the draft takes one more at the start, and is one ahead afterwards.
    assert prompts == [(0, 6), (0, 7), (6, 6), (7, 6), (12, 1), (13, 1), (0, 1)]
