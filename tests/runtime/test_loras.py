"""LoRA adapters: texts equal those of merged weights in any batch, slots change without recapture, and wrong files are refused."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stepgraph import Constraint, Engine, EngineClosedError, EngineConfig, Job
from stepgraph.graphs import TapeBackend
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.files.lora import read_lora
from stepgraph.runtime.models.files.transformers_folder import Implementation
from stepgraph.runtime.watchdog import RoundTimeoutError
from tests.helpers.adapters import ALPHA, save_adapter
from tests.helpers.c_library import needs_c
from tests.helpers.failing_copies import FailingCopies
from tests.helpers.families import BASE, folder_of, hf_model, random_model, save
from tests.helpers.toy_engines import TARGET, finish
from tests.runtime.models.files.test_quantised_folder import SIZES, write

FAMILY, PROMPT = "qwen2", [5 + index % 11 for index in range(40)]
CONFIG = EngineConfig(
    max_rows=3,
    num_speculative_tokens=2,
    draft_length=2,
    max_length=96,
    page_size=4,
    prefill_chunk=16,
    buckets=(1, 3),
    greedy_only=True,
    max_loras=2,
    max_lora_rank=8,
    compile_isolation="none",
)
PLAIN = replace(CONFIG, max_loras=0)
GRAMMAR = Constraint.regex("[a-f]{3,9}[0-9]+[A-Z]?")
Texts = dict[str, list[list[int]]]


def texts(engine: Engine, names: list[str]) -> list[list[int]]:
    """The texts of one request per adapter, without and then with a grammar."""
    found = list[list[int]]()
    for constraint in (None, GRAMMAR):
        jobs = [engine.submit(PROMPT, max_new_tokens=16, lora_name=name, constraint=constraint) for name in names]
        finish(engine)
        found += [job.tokens for job in jobs]
    return found


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of two adapters, and of the models with their weights merged."""
    folder = tmp_path_factory.mktemp("adapters")
    save(save_adapter(folder / "all", hf_model(FAMILY), 4), folder / "all merged")
    save(save_adapter(folder / "some", hf_model(FAMILY), 8, "k_proj v_proj up_proj", seed=2, use_rslora=True), folder / "some merged")
    return folder


@pytest.fixture(scope="module")
def merged(adapters: Path) -> Texts:
    """The texts of plain engines with merged weights."""
    found = Texts()
    for name, folder in (("", folder_of(FAMILY)), *((each, adapters / f"{each} merged") for each in ("all", "some"))):
        with Engine.from_pretrained(folder, None, config=PLAIN) as engine:
            found[name] = texts(engine, [""])
    assert len({str(each) for each in found.values()}) == 3, "the adapters change the text"
    return found


@pytest.fixture
def engine(adapters: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(folder_of(FAMILY), "ngram", config=CONFIG) as engine:
        engine.add_lora("all", adapters / "all")
        yield engine


@pytest.mark.parametrize("implementation", ["native", "transformers"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
def test_mixed_batches_equal_merged_weights(implementation: Implementation, drafter: str, adapters: Path, merged: Texts) -> None:
    """Prompts in chunks, with and without drafts; the draft model has no adapter."""
    path = folder_of(FAMILY)
    with Engine.from_pretrained(path, path if drafter == "model" else drafter, config=CONFIG, implementation=implementation) as engine:
        for name in ("all", "some"):
            engine.add_lora(name, adapters / name)
        names = ["some", "", "all"]
        assert texts(engine, names) == [merged[name][index] for index in (0, 1) for name in names]
        for name in names:
            assert texts(engine, [name]) == merged[name], f"{name!r} alone"


def test_engines_that_share_a_model_run_it_in_their_own_threads(adapters: Path, merged: Texts) -> None:
    """The second engine processes a prompt within that of the first one."""
    with Engine.from_pretrained(folder_of(FAMILY), None, config=CONFIG, implementation="transformers") as engine:
        target = engine._parts.models.target
        assert isinstance(target, torch.nn.Module)
        layer = next(module for module in target.modules() if isinstance(module, torch.nn.ModuleList))[0]
        with Engine(target, vocabulary=engine.vocabulary, config=PLAIN) as other:

            def interrupt(*_: object) -> None:
                hook.remove()
                other.generate(PROMPT[:3], max_new_tokens=1)

            engine.add_lora("all", adapters / "all")
            hook = layer.register_forward_pre_hook(interrupt)
            assert texts(engine, ["all"]) == merged["all"]
            assert other.stats().tokens == 1


def test_adapters_of_latent_attention_and_shared_experts_equal_merged_weights(tmp_path: Path) -> None:
    names = "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj gate_proj up_proj down_proj"
    folder = save(save_adapter(tmp_path / "adapter", hf_model("deepseek-v3"), 4, names), tmp_path / "merged")
    with Engine.from_pretrained(folder, None, config=PLAIN) as engine:
        expected = texts(engine, [""])
    with Engine.from_pretrained(folder_of("deepseek-v3"), "ngram", config=CONFIG, implementation="native") as engine:
        before = texts(engine, [""])
        engine.add_lora("it", tmp_path / "adapter")
        assert texts(engine, ["it"]) == expected != before


@pytest.mark.parametrize("rslora", [False, True])
def test_ranks_and_scales_of_some_modules_equal_merged_weights(rslora: bool, adapters: Path, tmp_path: Path) -> None:
    """The first pattern that matches counts; one matches the end of a name, but not whole parts of it, which has no effect."""
    ranks = {"q_proj": 2, r"^model\.layers\.0\..*_proj": 8, r"layers\.1\.mlp\.up_proj": 6, "roj": 7}
    alphas = {"model.layers.1.self_attn.v_proj": 3.5, "q_proj": 24}
    others = {"q_proj": (2, 24), "layers.1.mlp.up_proj": (6, ALPHA), "layers.1.self_attn.v_proj": (4, 3.5)}
    others |= {f"layers.0.{each}": (8, ALPHA) for each in ("self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")}
    others |= {f"layers.0.mlp.{each}_proj": (8, ALPHA) for each in ("gate", "up", "down")}
    fields: dict[str, Any] = {"rank_pattern": ranks, "alpha_pattern": alphas, "use_rslora": rslora}
    folder = save(save_adapter(tmp_path / "adapter", hf_model(FAMILY), 4, others=others, **fields), tmp_path / "merged")
    with Engine.from_pretrained(folder, None, config=PLAIN) as engine:
        expected = texts(engine, [""])
    with Engine.from_pretrained(folder_of(FAMILY), "ngram", config=CONFIG) as engine:
        before = texts(engine, [""])
        engine.add_lora("it", tmp_path / "adapter")
        assert texts(engine, ["it"]) == expected != before


@needs_c
def test_adapters_of_quantised_weights_equal_merged_weights(tmp_path: Path) -> None:
    """The merged weights are the dequantised weights plus those of the adapter."""
    model = random_model("Llama", BASE | SIZES, seed=1)
    model.load_state_dict(write(tmp_path, "FP8 per tensor", model))
    whole = save(save_adapter(tmp_path / "adapter", model, 4), tmp_path / "merged")
    with Engine.from_pretrained(whole, None, config=PLAIN) as engine:
        expected = texts(engine, [""])
    with Engine.from_pretrained(tmp_path, "ngram", config=CONFIG, weights="quantised") as engine:
        before = texts(engine, [""])
        engine.add_lora("it", tmp_path / "adapter")
        assert texts(engine, ["it"]) == expected != before


def test_adapters_change_without_recapture(adapters: Path, merged: Texts) -> None:
    with Engine.from_pretrained(folder_of(FAMILY), "ngram", config=CONFIG) as engine:
        report, buffers = engine.capture(), engine.buffers.fingerprint()
        graphs = dict(engine._graphs._recorded)
        assert "adapters: up to 2 of rank 8" in report.notes
        for name in ("all", "some", "all"):
            engine.add_lora("it", adapters / name)
            assert texts(engine, ["it"]) == merged[name]
            assert engine.remove_lora("it") and not engine.remove_lora("it")
        assert texts(engine, [""]) == merged[""]
        assert engine._graphs._recorded == graphs and engine.buffers.fingerprint() == buffers


def test_prefixes_are_cached_per_adapter(engine: Engine, adapters: Path) -> None:
    def cached(name: str) -> int:
        return engine.generate(PROMPT, max_new_tokens=1, lora_name=name).num_cached_tokens

    engine.add_lora("some", adapters / "some")
    assert [cached(name) for name in ("", "all", "some", "", "all", "some")] == [0, 0, 0, 36, 36, 36]
    engine.remove_lora("some")
    engine.add_lora("some", adapters / "some")
    assert cached("some") == 0, "another adapter may have the name now"


def test_a_removed_adapter_keeps_its_slot_until_its_requests_end(engine: Engine, adapters: Path, merged: Texts) -> None:
    job = engine.submit(PROMPT, max_new_tokens=16, lora_name="all")
    engine.step()
    engine.remove_lora("all")
    engine.add_lora("some", adapters / "some")
    assert engine.list_loras() == ["some"]
    with pytest.raises(ValueError, match=r"with no free slot, expected at most EngineConfig.max_loras=2 adapters, those of unfinished"):
        engine.add_lora("third", adapters / "some")
    finish(engine)
    assert job.tokens == merged["all"][0]
    engine.add_lora("third", adapters / "some")
    assert texts(engine, ["third", "some"]) == [merged["some"][0]] * 2 + [merged["some"][1]] * 2


def test_a_replaced_adapter_serves_its_requests_until_they_end(engine: Engine, adapters: Path, merged: Texts) -> None:
    """Of the old adapter: one request that decodes and one that waits for a row. Its slot is used again once they have ended."""
    old = [engine.submit(PROMPT, max_new_tokens=16, lora_name="all") for _ in range(4)]
    engine.step()
    with pytest.raises(ValueError, match="lora_name: got 'all', which is loaded, expected another name, or replace=True"):
        engine.add_lora("all", adapters / "some")
    engine.add_lora("all", adapters / "some", replace=True)
    new = engine.submit(PROMPT, max_new_tokens=16, lora_name="all")
    assert engine.list_loras() == ["all"]
    with pytest.raises(ValueError, match="with no free slot"):
        engine.add_lora("all", adapters / "all", replace=True)
    finish(engine)
    assert [job.tokens for job in old] == [merged["all"][0]] * 4 and new.tokens == merged["some"][0]
    assert not new.num_cached_tokens
    engine.add_lora("other", adapters / "some")
    for name in ("all", "some", "all"):  # both slots are in use: the adapter is replaced in its own
        engine.add_lora("all", adapters / name, replace=True)
        assert texts(engine, ["all"]) == merged[name]


def test_an_error_of_a_round_that_an_adapter_finds_closes_the_engine(engine: Engine, adapters: Path) -> None:
    job = engine.submit(PROMPT, max_new_tokens=20)
    engine.step()
    engine.backend.run(lambda: 1 / 0)  # as of a round in flight
    event = engine.backend.event()
    while not event.query():
        time.sleep(0.001)
    with pytest.raises(ZeroDivisionError):
        engine.add_lora("some", adapters / "some")
    assert (job.finish_reason, job.error) == ("error", "ZeroDivisionError: division by zero") and engine.list_loras() == ["all"]
    with pytest.raises(EngineClosedError):
        engine.step()


def test_an_adapter_waits_within_the_limit_for_rounds(adapters: Path) -> None:
    """A copy from pageable memory would wait in the driver."""
    with Engine.from_pretrained(folder_of(FAMILY), None, config=replace(CONFIG, round_timeout_seconds=0.2)) as engine:
        go = threading.Event()
        engine.backend.run(lambda: go.wait(30))
        with pytest.raises(RoundTimeoutError):
            engine.add_lora("all", adapters / "all")
        go.set()


def test_a_time_out_names_the_copy_of_an_adapter(adapters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.from_pretrained(folder_of(FAMILY), None, config=replace(CONFIG, round_timeout_seconds=0.5)) as engine:
        real, go = engine.backend.run, threading.Event()
        with monkeypatch.context() as patch:
            patch.setattr(engine.backend, "run", lambda function: real(lambda: (function(), go.wait(30))))
            engine.add_lora("all", adapters / "all")
        with pytest.raises(RoundTimeoutError, match=r"seconds\): copy of the adapter 'all'$"):
            engine.generate(PROMPT, max_new_tokens=2)
        go.set()


@pytest.mark.parametrize("others", [0, 1], ids=["another slot", "its own slot"])
def test_a_copy_that_fails_leaves_the_replaced_adapter_unless_it_had_the_only_slot(
    others: int, engine: Engine, adapters: Path, merged: Texts
) -> None:
    """A request that was submitted with the new one meanwhile is cancelled."""
    late = list[Job]()

    class Failing(FailingCopies):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            try:
                return super().__torch_dispatch__(function, types, args, kwargs)
            except torch.OutOfMemoryError:
                late.append(engine.submit(PROMPT, lora_name="it"))
                raise

    models = engine._parts.models
    with Engine(models.target, "ngram", vocabulary=engine.vocabulary, config=CONFIG, backend=TapeBackend()) as engine:
        for name in ("it", *["other"] * others):
            engine.add_lora(name, adapters / "all")
        with Failing(engine.buffers.target_0_qkv_up, 1), pytest.raises(torch.OutOfMemoryError):
            engine.add_lora("it", adapters / "some", replace=True)
        finish(engine)
        assert late[0].finish_reason == "cancelled" and not late[0].tokens
        assert engine.list_loras() == [*["other"] * others, *["it"] * (1 - others)]
        assert texts(engine, ["other" if others else "it"]) == merged["all"]
        engine.add_lora("it", adapters / "some", replace=True)
        assert texts(engine, ["it"]) == merged["some"]


def test_a_request_gets_the_adapter_that_replaces_its_own_during_submit(
    engine: Engine, adapters: Path, merged: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check of its arguments and the queue; a removed one is refused there."""
    make_job = engine._parts.validator.make_job

    def while_submitting(change: Callable[[], object]) -> None:
        def made(*arguments: Any) -> Job:
            job = make_job(*arguments)
            change()
            return job

        monkeypatch.setattr(engine._parts.validator, "make_job", made)

    while_submitting(lambda: engine.add_lora("all", adapters / "some", replace=True))
    job = engine.submit(PROMPT, max_new_tokens=16, lora_name="all")
    finish(engine)
    assert job.tokens == merged["some"][0]
    while_submitting(lambda: engine.remove_lora("all"))
    with pytest.raises(ValueError, match="lora_name: got 'all', expected '': the engine has no adapters"):
        engine.submit(PROMPT, lora_name="all")
    assert not engine.has_work


def test_wrong_arguments_are_refused(engine: Engine, adapters: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lora_name: got 'other', expected one of 'all', or '' for none"):
        engine.submit(PROMPT, lora_name="other")
    with pytest.raises(ValueError, match="lora_name: got 'all', which is loaded"):
        engine.add_lora("all", adapters / "some")
    with pytest.raises(ValueError, match="lora_name: got '', expected a name"):
        engine.add_lora("", adapters / "some")
    with pytest.raises(ValueError, match=r"EngineConfig\.max_loras: got 2, expected 0: ToyTarget has no lora_weights"):
        Engine(TARGET, config=CONFIG)
    with pytest.raises(ValueError, match=r"Engine\.record: .* expected None with max_loras: a recording has no adapters"):
        Engine.from_pretrained(folder_of(FAMILY), "ngram", config=CONFIG, record=tmp_path / "run.jsonl")
    with (
        Engine.from_pretrained(folder_of(FAMILY), "ngram", config=PLAIN) as plain,
        pytest.raises(ValueError, match="no slots for adapters, expected EngineConfig"),
    ):
        plain.add_lora("all", adapters / "all")


Q = "base_model.model.model.layers.0.self_attn.q_proj"
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {  # changed fields; changed tensors, None for a missing one; the error
    "rank": ({"r": 9}, {}, r"adapter_config.json.r: got 9, expected a whole number from 1 to EngineConfig.max_lora_rank=8"),
    "scale": ({"lora_alpha": 1e6}, {}, "adapter_config.json.lora_alpha: got 1000000.0, expected a number above 0 and below 1e6"),
    "kind": ({"peft_type": "LOHA"}, {}, "adapter_config.json.peft_type: got 'LOHA', expected 'LORA'"),
    "dora": ({"use_dora": True}, {}, "adapter_config.json.use_dora: got True"),
    "rank of a module": (
        {"rank_pattern": {"q_proj": 9}},
        {},
        r"adapter_config.json.rank_pattern\['q_proj'\]: got 9, expected a whole number",
    ),
    "other rank of a module": ({"rank_pattern": {"q_proj": 2}}, {}, r"q_proj.lora_A.weight: got shape \(4, 64\), expected \(2, 64\)"),
    "scale of a module": ({"alpha_pattern": {"q_proj": 0}}, {}, r"adapter_config.json.alpha_pattern\['q_proj'\]: got 0, expected a number"),
    "pattern": ({"rank_pattern": {"(": 2}}, {}, r"rank_pattern: got '\(' \(.*\), expected patterns of module names"),
    "patterns": ({"rank_pattern": [2]}, {}, r"rank_pattern: got \[2\], expected an object"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, {}, "adapter_config.json.modules_to_save: got"),
    "shape": ({}, {f"{Q}.lora_A.weight": torch.zeros(4, 63)}, r"q_proj.lora_A.weight: got shape \(4, 63\), expected \(4, 64\)"),
    "other rank": ({"r": 3}, {}, r"lora_A.weight: got shape \(4, 96\), expected \(3, 96\)"),
    "one matrix": ({}, {f"{Q}.lora_B.weight": None}, r"q_proj.lora_B.weight is missing, expected it with shape \(64, 4\)"),
    "type": ({}, {f"{Q}.lora_A.weight": torch.zeros(4, 64, dtype=torch.int8)}, "q_proj.lora_A.weight: got type I8"),
    "numbers": ({}, {f"{Q}.lora_A.weight": torch.full((4, 64), torch.nan)}, "q_proj.lora_A.weight holds NaN or infinity"),
    "module": (
        {},
        {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)},
        "base_model.model.lm_head.lora_A.weight: got this name, expected .* of the model's down_proj, gate_proj, k_proj, o_proj",
    ),
    "layer": ({}, {Q.replace("0", "7") + ".lora_A.weight": torch.zeros(4, 64)}, "layers.7.self_attn.q_proj.lora_A.weight: got this name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_do_not_fit_are_refused(case: str, engine: Engine, adapters: Path, tmp_path: Path) -> None:
    """The error names the file and the field or tensor; the engine does not change."""
    fields, tensors, message = REFUSED[case]
    stored = {**load_file(adapters / "all" / "adapter_model.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, tmp_path / "adapter_model.safetensors")
    config = json.loads((adapters / "all" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ValueError, match=message) as refusal:
        engine.add_lora("wrong", tmp_path)
    assert str(tmp_path) in str(refusal.value) and engine.list_loras() == ["all"]


def test_a_scaled_adapter_that_float16_cannot_hold_is_refused(adapters: Path, tmp_path: Path) -> None:
    folder, weights = shutil.copytree(adapters / "all", tmp_path / "large"), open_checkpoint(folder_of(FAMILY)).outline().lora_weights
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 9e5}))
    assert read_lora(folder, weights, 8, torch.float32)
    with pytest.raises(ValueError, match=r"lora_B.weight times lora_alpha / r holds NaN or infinity"):
        read_lora(folder, weights, 8, torch.float16)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    file, name = folder / "adapter_model.safetensors", f"{Q}.lora_A.weight"
    save_file(load_file(file) | {name: torch.full((4, 64), 1e5)}, file)
    with pytest.raises(ValueError, match=r"q_proj.lora_A.weight in torch.float16 holds NaN or infinity"):
        read_lora(folder, weights, 8, torch.float16)


def test_damaged_adapters_are_refused(adapters: Path, tmp_path: Path) -> None:
    """Raises only ValueErrors, whatever bytes of the header and the config change."""
    drawn, weights, accepted = Random(1), open_checkpoint(folder_of(FAMILY)).outline().lora_weights, 0
    for name, head in (("adapter_model.safetensors", 3000), ("adapter_config.json", 10_000)):
        whole = {each: (adapters / "all" / each).read_bytes() for each in ("adapter_model.safetensors", "adapter_config.json")}
        for _ in range(60):
            damaged = bytearray(whole[name])
            for _ in range(drawn.choice((1, 2, 8))):
                damaged[drawn.randrange(min(head, len(damaged)))] = drawn.choice((0, 127, 255, drawn.randrange(256)))
            for each, content in (whole | {name: bytes(damaged)}).items():
                (tmp_path / each).write_bytes(content)
            with contextlib.suppress(ValueError):
                read_lora(tmp_path, weights, 8, torch.float32)
                accepted += 1
    assert accepted < 40
