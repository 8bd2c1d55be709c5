"""Examples of the READMEs run as they stand, and what these name exists. AsyncEngine's is run by test_examples.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgraph import Engine, EngineConfig, Vocabulary
from stepgraph.graphs import BufferSpec, StaticBuffers, capture
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from tests.helpers.documents import READMES, ROOT, SNIPPETS, snippet

EMBED, MODEL, CAPTURE = snippet("max_rows=8"), snippet("class Recurrent"), snippet('backend="tape"')


def test_the_embed_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {}
    exec(EMBED, namespace)
    assert namespace["job"].finish_reason == "constraint_complete"
    assert capsys.readouterr().out.splitlines()[-1] in ("b'{\"ok\": true}' constraint_complete", "b'{\"ok\": false}' constraint_complete")
    assert len([line for line in EMBED.splitlines() if line.strip()]) <= 15


def test_the_example_of_a_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "readme"}
    torch.manual_seed(1)
    exec(MODEL, namespace)
    assert re.fullmatch(r"b'[a-z]{3,12}'", capsys.readouterr().out.strip())
    assert namespace["job"].finish_reason in ("constraint_complete", "stop")
    assert len([line for line in MODEL.splitlines() if line.strip()]) <= 60


def test_the_capture_example_runs() -> None:
    namespace: dict[str, Any] = {}
    exec(CAPTURE, namespace)
    buffers = namespace["buffers"]
    assert torch.equal(buffers.y, torch.softmax(buffers.x * 2, 0))
    assert len([line for line in CAPTURE.splitlines() if line.strip()]) <= 10


def test_the_stream_example_runs() -> None:
    specs = [BufferSpec(name, (4,), torch.float32) for name in ("x", "y", "answer")]
    specs += [BufferSpec(name, (4,), torch.float32, "pinned") for name in ("seen_host", "answer_host")]
    buffers = StaticBuffers(specs)
    namespace: dict[str, Any] = {"torch": torch, "think": lambda: buffers.answer_host.copy_(buffers.seen_host + 1)}
    exec(snippet("context.host_node"), namespace)
    recorded = capture(namespace["step"], buffers, backend="tape")
    buffers.x.copy_(torch.arange(4.0))
    recorded.replay()
    assert buffers.y.tolist() == [1.0, 4.0, 7.0, 10.0]


def test_the_profile_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    vocabulary = Vocabulary.printable()
    target = ToyTarget(vocabulary.logits_width)
    config = EngineConfig(max_rows=1, num_speculative_tokens=2, max_length=64, greedy_only=True)
    with Engine(target, ToyDraft(target), vocabulary=vocabulary, config=config) as engine:
        engine.capture()
        engine.submit([1, 2, 3], max_new_tokens=12)
        exec(snippet("engine.trace"), {"engine": engine})
    assert "target_verify" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rounds.json", "rounds.png"]


def test_the_error_it_shows_is_the_error_one_gets() -> None:
    from stepgraph.graphs import CaptureError

    buffers = StaticBuffers([BufferSpec("x", (4,), torch.float32)])

    def step(buffers: StaticBuffers) -> None:
        buffers.x.mul_(buffers.x.max().item())

    with pytest.raises(CaptureError) as caught:
        capture(step, buffers, backend="tape")
    rule, told = re.search(r"CaptureError: \[([\w-]+)\] (.*)", READMES["README.md"]).groups()  # type: ignore[union-attr]
    assert caught.value.rule == rule
    assert told in str(caught.value)


@pytest.mark.parametrize("document", READMES)
def test_every_test_and_file_it_names_exists(document: str) -> None:
    tests = {path.relative_to(ROOT / "tests").as_posix(): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    text, last = READMES[document], ""
    for file, name in re.findall(r"`(?:tests/)?(?=(?:\w+/)*test_|::)((?:\w+/)*test_\w+\.py)?(?:::(test_\w+))?`", text):
        last = file or last
        assert last in tests, last
        assert not name or f"def {name}(" in tests[last], f"{last}::{name}"
    for path, place in re.findall(r"\]\(([\w/.]+)(?:#([\w-]+))?\)", text):
        target = (ROOT / document).parent / path
        assert target.exists(), path
        assert not place or re.search(rf"(?mi)^## {place.replace('-', ' ')}$", target.read_text(encoding="utf-8")), f"{path}#{place}"


def test_every_example_is_run_by_some_test() -> None:
    run = {EMBED, MODEL, CAPTURE, snippet("context.host_node"), snippet("engine.trace"), snippet("AsyncEngine")}
    assert run == set(SNIPPETS), "one that nobody runs is wrong sooner or later"
