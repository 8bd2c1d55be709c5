"""The compile worker: its calls over a socket, its errors, and how the parent replaces a process that is lost."""

from __future__ import annotations

import json
import marshal
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import pytest
import xgrammar

from stepgraph.sampling.grammar import GrammarLimits
from stepgraph.sampling.grammar.compile.limits import MIB, CompileAbortedError
from stepgraph.sampling.grammar.compile.worker import DONE, FAILED, NO_MEMORY, TOO_LARGE, Libraries, receive, send
from stepgraph.sampling.grammar.compile.worker_process import SCRIPT, CompileWorker
from tests.helpers.grammar_texts import PRINTABLE

RESULT_BYTES = 60_000
OPTIONS = {
    "stop_token_ids": PRINTABLE.stop_token_ids,
    "non_text_ids": sorted(PRINTABLE.non_text_ids),
    "width": PRINTABLE.logits_width,
    "max_threads": 1,
    "limits": asdict(GrammarLimits(compile_seconds=60.0, compile_bytes=64 * MIB, result_bytes=RESULT_BYTES, least_bytes=RESULT_BYTES)),
}
TABLES = marshal.dumps([PRINTABLE.for_xgrammar, PRINTABLE.for_llguidance])
Call = Callable[..., tuple[str, str]]


def ebnf(grammar: str, root: str = "root") -> tuple[str, str, str, dict[str, object]]:
    """The arguments of the call that compiles a constraint of kind ebnf."""
    return "xgrammar", "ebnf", json.dumps([root, grammar]), {}


A = ebnf('root ::= "a"')


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    """A worker that the tests share, because errors do not end it. It exits without an error when its socket is closed."""
    ours, theirs = socket.socketpair()
    ours.settimeout(120)
    worker = subprocess.Popen([sys.executable, "-I", str(SCRIPT), *filter(None, sys.path)], stdin=theirs.fileno(), stderr=subprocess.PIPE)
    theirs.close()

    answers = ours.makefile("rb")
    send(ours, OPTIONS, body=TABLES)
    assert receive(answers) == ([DONE, False], b"")

    def call(name: str, *arguments: object) -> tuple[str, str]:
        send(ours, name, *arguments)
        (status, _), result = receive(answers)
        return status, result.decode()

    yield call
    answers.close()
    ours.close()
    assert worker.communicate(timeout=60)[1] == b"" and worker.returncode == 0


@pytest.fixture
def worker() -> Iterator[CompileWorker]:
    worker = CompileWorker(PRINTABLE, GrammarLimits(compile_seconds=1.0), 1)
    yield worker
    worker.close()


@pytest.mark.parametrize(
    ("kind", "payload", "rule"),
    [
        ("ebnf", json.dumps(["root", 'root ::= "a" root | "b"']), 'root_0 ::= (("a" root_0) | ("b"))'),
        ("json_schema", '{"enum": ["a", 1]}', r'root_0 ::= (("1") | ("\"a\""))'),
        ("choice", '["a", "b"]', 'root ::= (("a") | ("b"))'),
    ],
)
def test_worker_compiles_a_constraint_in_one_call(call: Call, kind: str, payload: str, rule: str) -> None:
    status, compiled = call("xgrammar", kind, payload, {})
    assert status == DONE
    restored = xgrammar.CompiledGrammar.deserialize_json(compiled, PRINTABLE.tokenizer_info)
    assert rule in str(restored.grammar).splitlines()


def test_llguidance_call_returns_the_grammar_even_if_invalid(call: Call) -> None:
    status, text = call("lark", "json_schema", '{"type": "null"}', {})
    assert status == DONE and text.endswith('start: root\nroot: "null"\n')
    status, text = call("lark", "lark", "start: there_is_no_such_rule", {})
    assert status == DONE and "there_is_no_such_rule" in text, "the parent compiles again and reports the error"


def test_library_error_is_returned_and_the_worker_continues(call: Call) -> None:
    status, message = call(*ebnf("root ::= there_is_no_such_rule"))
    assert status == FAILED and "there_is_no_such_rule" in message
    assert call(*A)[0] == DONE


def test_grammar_without_finite_text_is_aborted(call: Call) -> None:
    assert call(*ebnf('root ::= "a" root')) == ("CompileAbortedError", '["rule root: no text of finite length satisfies it"]')


def test_too_large_result_is_reported_by_its_size(call: Call) -> None:
    status, size = call(*ebnf('root ::= "' + "a" * 8000 + '"'))
    assert status == TOO_LARGE and int(size) > RESULT_BYTES


def test_out_of_memory_is_reported_and_the_worker_continues(call: Call) -> None:
    assert call(*ebnf("root ::= " + "[a]?" * 29_000)) == (NO_MEMORY, "")
    assert call(*A)[0] == DONE


def test_the_bindings_raise_no_error_in_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their newest form; a TypeError of the bindings takes longer than the rest of a start."""
    core, calls = vars(xgrammar.base)["_core"], list[int]()
    made = core.GrammarCompiler

    def counted(*arguments: object) -> object:
        calls.append(len(arguments))
        return made(*arguments)

    monkeypatch.setattr(core, "GrammarCompiler", counted)
    monkeypatch.setattr("stepgraph.sampling.grammar.compile.worker._xgrammar_bindings", lambda: core)
    Libraries(OPTIONS, TABLES)
    assert calls == [5, 4][: 1 + version("xgrammar").startswith("0.2.8")]


def test_stopped_worker_is_replaced(worker: CompileWorker) -> None:
    """The timer of a process that is stopped by a signal does not run."""
    first = worker.call(*A)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    message = r"GrammarLimits\.compile_seconds: got no answer from the compile worker, expected at most 1\.0 s"
    with pytest.raises(CompileAbortedError, match=message):
        worker.call(*A)
    assert worker.pid is None and worker.call(*A) == first and worker.processes_started == 2


def test_answer_that_could_not_be_read_is_not_that_of_the_next_call(worker: CompileWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(stream: object) -> None:
        raise MemoryError

    first = worker.call(*A)
    monkeypatch.setattr("stepgraph.sampling.grammar.compile.worker_process.receive", out_of_memory)
    with pytest.raises(MemoryError):
        worker.call(*ebnf('root ::= "b"'))
    monkeypatch.undo()
    assert worker.call(*A) == first


def test_kill_before_the_process_exists_cancels_the_compile(worker: CompileWorker) -> None:
    worker.kill()
    with pytest.raises(CompileAbortedError, match="the compile was cancelled, before it was ready"):
        worker.call(*A)
    worker.begin_compile()
    assert worker.call(*A)


def test_a_lower_limit_of_the_process_is_kept(worker: CompileWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = tmp_path / "python"
    limited.write_text(f'#!/bin/sh\nulimit -v 1000000\nexec {sys.executable} "$@"\n', encoding="utf-8")
    limited.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(limited))
    assert worker.call(*A)


def test_a_library_is_loaded_without_the_limit_of_the_previous_call() -> None:
    worker = CompileWorker(PRINTABLE, GrammarLimits(compile_bytes=4 * MIB), 1)
    assert worker.call(*A) and worker.call("lark", "lark", 'start: "a"', {}) and worker.processes_started == 1
    worker.close()
