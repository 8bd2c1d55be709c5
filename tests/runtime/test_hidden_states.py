"""Saved hidden states equal those of one pass over the text without a cache, and saving does not affect requests."""

from __future__ import annotations

import resource
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stepgraph import Engine, EngineConfig, Job, SamplingParams
from stepgraph.graphs import TapeBackend
from stepgraph.runtime.hidden_states import SavedText, StatesLayout, StatesWriter
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.toy import ToyDraft
from tests.helpers.families import FEATURE_LAYERS, folder_of, hf_model
from tests.helpers.family_texts import CONFIG, CONSTRAINTS, PROMPTS
from tests.helpers.toy_engines import TARGET, VOCABULARY, switch_draft_lengths
from tests.runtime.models.test_llama_engine import DraftLlama
from tests.runtime.test_engine import NoSyncs
from tools.train.saved_states import SavedStates

LAYOUT = StatesLayout("model", 100, (0, 2), 6, 3, "float32")


def saving_engine(folder: Path, k: int, **changes: Any) -> Engine:
    checkpoint = open_checkpoint(folder_of("smollm2"))
    target = checkpoint.load("cpu", FEATURE_LAYERS)
    config = EngineConfig(
        **{
            **vars(CONFIG),
            "num_speculative_tokens": k,
            "draft_length": k,
            "buckets": (3,),
            "save_hidden_states": folder,
            "greedy_only": True,
            **changes,
        }
    )
    draft = DraftLlama(checkpoint.load("cpu"), 0.05) if k else None
    engine = Engine(target, draft, vocabulary=checkpoint.vocabulary, config=config)
    engine.capture()
    return engine


def toy_engine(folder: Path, record: Path | None = None, **changes: Any) -> Engine:
    sizes: dict[str, Any] = {"max_rows": 2, "num_speculative_tokens": 2, "draft_length": 2, "max_length": 64}
    config = EngineConfig(save_hidden_states=folder, greedy_only=True, eager=True, **sizes, **changes)
    engine = Engine(TARGET, ToyDraft(TARGET, 0.7), vocabulary=VOCABULARY, config=config, record=record)
    engine.capture()
    return engine


def finish(engine: Engine, jobs: list[Job]) -> list[Job]:
    for _ in engine.stream():
        pass
    assert all(job.finished for job in jobs)
    return jobs


@pytest.mark.parametrize(("k", "switching"), [(0, False), (3, False), (3, True)])
def test_saved_states_equal_one_pass_over_the_text(tmp_path: Path, k: int, switching: bool) -> None:
    """switching: every round has a random draft length."""
    with saving_engine(tmp_path, k, **({"draft_length": "auto"} if switching else {})) as engine:
        if switching:
            switch_draft_lengths(engine)
        guard = NoSyncs(engine.buffers)
        jobs = [engine.submit(prompt, constraint=rule, max_new_tokens=20) for prompt in PROMPTS for rule in (None, CONSTRAINTS[1])]
        engine.submit([5, 6, 7, 8, 9], prompt_embeddings={1: torch.ones(2, 48)}, max_new_tokens=20)  # not saved: no token ids
        with guard:
            finish(engine, jobs)
        assert engine.stats().host_syncs == 0 and guard.pinned_reads > 10
        assert k == 0 or engine.stats().drafts.accepted > 20
        assert len({graph.key.drafting for graph in engine.stats().graphs}) == (3 if switching else 1)
    saved = SavedStates(tmp_path)
    assert saved.layout == StatesLayout(folder_of("smollm2").name, 160, FEATURE_LAYERS, 3 * 48, 48, "float32")
    texts = {tuple(text.token_ids.tolist()): text for text in saved}
    assert {(*job.prompt_ids, *job.tokens) for job in jobs} == set(texts)
    assert saved.lengths == [len(text.token_ids) for text in saved]
    reference = hf_model("smollm2").model
    for job in jobs:
        text = texts[tuple([*job.prompt_ids, *job.tokens])]
        with torch.no_grad():
            expected = reference(text.token_ids[None, :-1], output_hidden_states=True).hidden_states
        assert text.prompt_length == len(job.prompt_ids)
        torch.testing.assert_close(text.features, torch.cat([expected[layer][0] for layer in FEATURE_LAYERS], -1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(text.hidden, expected[-1][0], rtol=1e-4, atol=1e-4)


def test_states_are_not_mixed_up_by_a_slow_device_and_prompt_bursts(tmp_path: Path) -> None:
    """The toy's states are a hash of the whole prefix, so one wrong ring line is detected."""
    config: dict[str, Any] = {"prefill_chunk": 3, "rounds_in_flight": 3, "max_rows": 4}
    prompts = [[index % 7 + 1] * length for index, length in enumerate([1, 9, 2, 14, 30, 3, 3, 5, 8, 21])]
    tokens: list[dict[tuple[int, ...], list[int]]] = []
    for lag in (0.0, 0.003):
        folder = tmp_path / f"lag {lag}"
        settings = EngineConfig(
            num_speculative_tokens=2, draft_length=2, max_length=64, save_hidden_states=folder, greedy_only=True, buckets=(4,), **config
        )
        backend = TapeBackend(asynchronous=True, delay=lambda name, lag=lag: lag)  # type: ignore[misc]
        with Engine(TARGET, ToyDraft(TARGET, 0.7), vocabulary=VOCABULARY, config=settings, backend=backend) as engine:
            engine.capture()
            jobs = [engine.submit(prompt, max_new_tokens=12) for prompt in prompts]
            for _ in range(4):
                engine.step()
            engine.cancel(jobs[1])
            finish(engine, jobs)
        saved = SavedStates(folder)
        tokens.append({tuple(text.token_ids.tolist()): text.hidden.tolist() for text in saved})
        assert {text.prompt_length for text in saved} <= {len(prompt) for prompt in prompts}
    shared = tokens[0].keys() & tokens[1].keys()
    assert len(shared) >= 9 and all(tokens[0][text] == tokens[1][text] for text in shared)


def test_answers_that_the_end_of_the_engine_cuts_are_not_saved(tmp_path: Path) -> None:
    with toy_engine(tmp_path) as engine:
        jobs = [engine.submit([token], sampling=SamplingParams(temperature=0, ignore_eos=True), max_new_tokens=60) for token in (5, 6)]
        while min(len(job.tokens) for job in jobs) < 4:
            engine.step()
        engine.cancel(jobs[0])
        engine.step()
    assert [text.token_ids.tolist() for text in SavedStates(tmp_path)] == [[5, *jobs[0].tokens]]


def test_several_engines_write_to_one_folder(tmp_path: Path) -> None:
    with toy_engine(tmp_path, states_shard_bytes=4000) as first, toy_engine(tmp_path, states_shard_bytes=4000) as second:
        for engine in (first, second):
            finish(engine, [engine.submit([index, 2], max_new_tokens=8) for index in range(4)])
            engine.close()
    saved = SavedStates(tmp_path)
    assert len(saved) == 8 and len(list(tmp_path.glob("*.safetensors"))) == 2
    assert [text.token_ids.tolist() for text in saved][:4] == [text.token_ids.tolist() for text in saved][4:]
    with pytest.raises(ValueError, match=r"got states of StatesLayout.*expected an empty folder or states of"):
        saving_engine(tmp_path, 0)


def test_engine_without_saving_has_no_state_buffers() -> None:
    with Engine(TARGET, vocabulary=VOCABULARY, config=EngineConfig(num_speculative_tokens=0, max_rows=1)) as engine:
        assert not [name for name in engine.buffers if "states" in name]


@pytest.mark.parametrize("size", [None, True, 0, -1])
def test_target_without_hidden_size_raises(tmp_path: Path, size: object) -> None:
    class Silent(type(TARGET)):  # type: ignore[misc]
        hidden_size = property(lambda self: size, lambda self, value: None)

    with pytest.raises(ValueError, match=rf"EngineConfig.save_hidden_states: got a target with hidden_size {size}, expected the width"):
        Engine(Silent(20), config=EngineConfig(num_speculative_tokens=0, save_hidden_states=tmp_path))


@pytest.mark.parametrize("value", ["", 3, True])
def test_bad_settings_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"EngineConfig.save_hidden_states: got .*expected the path of a folder"):
        EngineConfig(save_hidden_states=value)
    with pytest.raises(ValueError, match=r"EngineConfig.states_shard_bytes: got 0, expected a whole number >= 1"):
        EngineConfig(states_shard_bytes=0)


def test_unusable_folder_raises_at_construction(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below", tmp_path / "no" / "such", Path("a\0b")):
        with pytest.raises(ValueError, match=r"EngineConfig.save_hidden_states: .*expected a writable folder"):
            toy_engine(folder)
    (recording := tmp_path / "run.jsonl").write_text("")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"preemption": True}, "preemption: got True with save_hidden_states"),
        ({"page_allocation": "grow"}, "page_allocation: got 'grow' with save_hidden_states=.*, expected 'reserve'"),
        ({"record": recording}, r"record: got '.*run.jsonl' \(File exists\)"),
    ]
    for changes, message in refused:
        before = set(threading.enumerate())
        with pytest.raises(ValueError, match=message) as _kept:  # its frames hold what was built
            toy_engine(tmp_path, **changes)
        assert set(threading.enumerate()) <= before
        toy_engine(tmp_path).close()
    save_file({"x": torch.zeros(1)}, tmp_path / "states-00000.safetensors")
    with pytest.raises(ValueError, match="got no metadata named 'stepgraph hidden states 2', expected a file written by"):
        toy_engine(tmp_path)


def test_close_warns_of_states_that_could_not_be_written(tmp_path: Path) -> None:
    """All of a short run are in memory until then."""
    folder = tmp_path / "states"
    engine = toy_engine(folder)
    shutil.rmtree(folder)
    finish(engine, [engine.submit([1], max_new_tokens=8)])
    with pytest.warns(RuntimeWarning, match=r"EngineConfig.save_hidden_states: .*states.*; nothing more is saved"):
        engine.close()
    assert engine.stats().unsaved_texts == 1


def test_requests_continue_when_the_folder_disappears(tmp_path: Path) -> None:
    folder = tmp_path / "states"
    engine = toy_engine(folder, states_shard_bytes=1)
    shutil.rmtree(folder)
    jobs: list[Job] = []

    def decode_until_it_fails_and_then_once_more() -> None:
        while not engine.stats().saving_error:
            jobs.append(engine.submit([len(jobs) % 50], max_new_tokens=8))
            finish(engine, jobs)
        jobs.append(engine.submit([1], max_new_tokens=8))
        finish(engine, jobs)

    with pytest.warns(RuntimeWarning, match=r"EngineConfig.save_hidden_states: .*states.*; nothing more is saved, requests continue"):
        decode_until_it_fails_and_then_once_more()
    engine.close()
    stats = engine.stats()
    assert {str(job.finish_reason) for job in jobs} <= {"length", "stop"} and stats.saved_texts == 0 < stats.unsaved_texts
    assert str(folder) in stats.saving_error


def test_full_disk_leaves_only_complete_files(tmp_path: Path) -> None:
    """A file size limit simulates a full disk: a write beyond it fails in the same way."""

    def text(tokens: int) -> SavedText:
        return SavedText(torch.arange(tokens), 1, torch.rand(tokens - 1, 6), torch.rand(tokens - 1, 3))

    writer = StatesWriter(tmp_path, LAYOUT, shard_bytes=1)
    assert writer.put(text(4))
    while not writer.saved:
        pass
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        writer.put(text(3000))
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path) in writer.error and (writer.saved, writer.unsaved) == (1, 1)
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]
    assert [text.token_ids.tolist() for text in SavedStates(tmp_path)] == [[0, 1, 2, 3]]


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Texts that arrive faster than the disk writes are refused and counted."""
    writer = StatesWriter(tmp_path, LAYOUT, shard_bytes=40_000)
    text = SavedText(torch.arange(100), 1, torch.rand(99, 6), torch.rand(99, 3))
    with writer._lock:  # so the writing thread cannot change `_buffered_bytes` meanwhile
        held = writer._buffered_bytes = 79_000
    assert not writer.put(text) and writer.unsaved == 1
    writer._buffered_bytes -= held
    assert writer.put(text)
    writer.close()
    assert not writer.put(text) and (writer.saved, writer.unsaved) == (1, 2)


@pytest.mark.parametrize(
    ("written", "damaged", "message"),
    [
        (rb"\"feature_size\": 6", rb"\"feature_size\": 7", r"features of text 0: got the shape \(9, 6\), expected \(9, 7\)"),
        (rb"\"feature_size\": 6", rb"\"feature_size\": 0", "expected 3 tensors for each text"),
        (rb"\"hidden_size\"", rb"\"hidden_sizf\"", "hidden_sizf"),
        (rb"\"feature_layers\": [0, 2]", rb"\"feature_layers\": 30    ", "not iterable"),
        (b"hidden states 2", b"hidden states 1", "got no metadata named 'stepgraph hidden states 2'"),
        (b".token_ids", b".token_idz", r"text 0: .*token_ids"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, written: bytes, damaged: bytes, message: str) -> None:
    writer = StatesWriter(tmp_path, LAYOUT, 1 << 20)
    writer.put(SavedText(torch.arange(10), 1, torch.rand(9, 6), torch.rand(9, 3)))
    writer.close()
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    assert whole.count(written) == 1
    file.write_bytes(whole.replace(written, damaged))
    with pytest.raises(ValueError, match=message):
        SavedStates(tmp_path)
    file.write_bytes(whole[:40])
    with pytest.raises(ValueError, match=r"states-.*\.safetensors: "):
        SavedStates(tmp_path)
