"""Fuzzing of stepgraph's own file formats: engine recordings and folders of hidden states."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from stepgraph import Constraint, Engine, SamplingParams
from stepgraph.graphs import TapeBackend
from stepgraph.runtime.hidden_states import SHARDS, SavedText, StatesLayout, StatesWriter
from stepgraph.runtime.models.ngram import NgramLookup
from stepgraph.runtime.replay import read_recording, replay_on, version_differences
from tests.fuzz.folders import FolderDoor, chosen, put
from tests.fuzz.requests import CONFIG, WORKER
from tests.fuzz.values import Value, blob, bytes_of
from tests.helpers.toy_engines import TARGET, VOCABULARY, finish
from tools.train.saved_states import SavedStates

RECORDED = replace(CONFIG, logits_processors=())  # a recording has no functions


class RecordingDoor(FolderDoor):
    """A file written by Engine(record=...), line by line. One in `share` accepted recordings is replayed."""

    name = "recording"
    words: Sequence[str] = (
        "kind engine submit tokens end cancel closed full refused step job reason error why prompt_ids constraint sampling max_new_tokens"
        " num_speculative_tokens draft_ids cache_salt embeddings config versions models vocabulary format payload marker any_whitespace"
        " backend stop length cancelled ebnf regex lark choice json_schema structural_tag grammar_limits forced_acceptance buckets max_rows"
    ).split()
    allowed = WORKER
    named = re.compile(
        r"(/\S+:\d+: |/\S+: |(sampling|SamplingParams|Constraint)\b|constraint |prompt|max_new_tokens|num_spec|draft_ids|cache_salt)"
    )

    def __init__(self, thorough: bool = False) -> None:
        super().__init__(thorough)
        self._engine = engine()
        self.seeds = [recorded(self.folder / "seed.jsonl")]

    def prepare(self, given: Value) -> None:
        lines = given if isinstance(given, list) else [given]
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        put(self.folder / "run.jsonl", text + "\n")

    def enter(self, given: Value) -> None:
        run = read_recording(self.folder / "run.jsonl")
        assert all(isinstance(difference, str) for difference in version_differences(run))
        config = run.config
        assert config.max_queued >= len(run.requests)
        if chosen(given, self.share):
            replayed = replay_on(self._engine, run)
            assert replayed.requests == len(run.requests) and not self._engine.has_work

    def close(self) -> None:
        self._engine.close()
        super().close()


def engine(record: Path | None = None) -> Engine:
    made = Engine(TARGET, NgramLookup(), vocabulary=VOCABULARY, config=RECORDED, backend=TapeBackend(), record=record)
    made.capture()
    return made


def recorded(path: Path) -> list[Value]:
    """The recorded lines of a run with requests of several kinds."""
    with engine(path) as recorder:
        recorder.submit([1, 2], max_new_tokens=2, sampling=SamplingParams(temperature=0, logit_bias={5: 1.0}))
        recorder.submit([3], max_new_tokens=4, constraint=Constraint.regex("[a-c]{0,6}x?").after((3,)))
        cancelled = recorder.submit([4], max_new_tokens=9, constraint=Constraint.ebnf('root ::= "a" | "b" root'))
        recorder.step()
        recorder.cancel(cancelled)
        finish(recorder)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class StatesDoor(FolderDoor):
    """The header of a file of saved hidden states, with the layout in its metadata."""

    name = "states"
    words: Sequence[str] = (
        "model vocab_size feature_layers feature_size hidden_size dtype 0.token_ids 0.prompt_length"
        " 0.features 0.hidden 1.hidden F32 I64 shape data_offsets __metadata__"
    ).split()
    named = re.compile(r"/")

    def __init__(self, thorough: bool = False) -> None:
        super().__init__(thorough)
        layout = StatesLayout("model", 100, (0, 2), 6, 3, "float32")
        writer = StatesWriter(self.folder, layout, 1 << 20)
        for length in (4, 3):
            writer.put(SavedText(torch.arange(length), 2, torch.zeros(length - 1, 6), torch.zeros(length - 1, 3)))
        writer.close()
        (self._file,) = self.folder.glob(SHARDS)
        whole = self._file.read_bytes()
        end = 8 + struct.unpack("<Q", whole[:8])[0]
        document = {"header": json.loads(whole[8:end]), "numbers": len(whole) - end}
        self.seeds = [document, {"front": blob(whole[:end]), "numbers": len(whole) - end}]

    def prepare(self, given: Value) -> None:
        document = given if isinstance(given, dict) else {"header": given}
        front, numbers = bytes_of(document.get("front")), document.get("numbers")
        if front is None:
            header = json.dumps(document.get("header")).encode()
            front = struct.pack("<Q", len(header)) + header
        self._file.write_bytes(front + bytes(max(0, min(numbers, 1 << 16)) if type(numbers) is int else 0))

    def enter(self, given: Value) -> None:
        saved = SavedStates(self.folder)
        assert len(saved.lengths) == len(saved)
        for index, text in enumerate(saved):
            assert len(text.token_ids) == saved.lengths[index] and len(text.hidden) == len(text.token_ids) - 1
            assert text.features.shape[1:] == (saved.layout.feature_size or saved.layout.hidden_size,)
