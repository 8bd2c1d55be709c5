"""The compile worker as a script of its own, asked over its socket: every call, what it refuses, and its end."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import xgrammar

from stepgraph.sampling.grammar.compile.limits import MIB, GrammarLimits
from stepgraph.sampling.grammar.compile.worker import DONE, NO_MEMORY, REFUSED, TOO_LARGE, joined, packed, received
from stepgraph.sampling.grammar.compile.worker_process import SCRIPT
from tests.helpers.grammar_texts import PRINTABLE

RESULT_BYTES = 60_000
Ask = Callable[..., tuple[bytes, bytes]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """One worker for all of them: a refusal costs it nothing. It ends without an error where its parent lets go."""
    ours, theirs = socket.socketpair()
    ours.settimeout(120)
    worker = subprocess.Popen([sys.executable, "-I", str(SCRIPT), *filter(None, sys.path)], stdin=theirs.fileno(), stderr=subprocess.PIPE)
    theirs.close()

    def exchange(*parts: bytes) -> list[bytes]:
        ours.sendall(packed(parts))
        return received(ours)

    options = {
        "stop_token_ids": PRINTABLE.stop_token_ids,
        "non_text_ids": sorted(PRINTABLE.non_text_ids),
        "num_tokens": len(PRINTABLE.tokens),
        "width": PRINTABLE.logits_width,
        "max_threads": 1,
        "fuel": GrammarLimits().fuel,
    }
    limits = json.dumps([60.0, 64 * MIB, RESULT_BYTES]).encode()
    tables = joined(PRINTABLE.for_xgrammar), joined(PRINTABLE.for_llguidance)
    assert exchange(limits, json.dumps(options).encode(), *tables) == [DONE, b"", b""]

    def call(name: str, *arguments: str) -> tuple[bytes, bytes]:
        status, result, _ = exchange(name.encode(), *(argument.encode() for argument in arguments))
        return status, result

    yield call
    ours.close()
    assert worker.communicate(timeout=60)[1] == b"" and worker.returncode == 0


def test_every_call_answers_what_the_library_says_in_this_process_too(ask: Ask) -> None:
    grammar = xgrammar.Grammar.from_ebnf('root ::= "a" root | "b"')
    status, written = ask("written", 'root ::= "a" root | "b"', "root")
    assert (status, written.decode()) == (DONE, str(grammar))
    assert ask("parsed", 'root ::= "a" root | "b"', "root") == (DONE, grammar.serialize_json().encode())
    status, schema = ask("schema", '{"enum": ["a", 1]}', "0")
    assert status == DONE and b'"\\"a\\""' in schema and b'"1"' in schema
    status, compiled = ask("grammar", written.decode(), "root")
    restored = xgrammar.CompiledGrammar.deserialize_json(compiled.decode(), PRINTABLE.tokenizer_info)
    assert status == DONE and str(restored.grammar) == written.decode()
    assert ask("lark", 'start: "a" | "b"') == (DONE, b"")


def test_a_grammar_that_llguidance_refuses_is_left_to_the_parent_to_tell(ask: Ask) -> None:
    assert ask("lark", "start: there_is_no_such_rule") == (DONE, b"")


def test_a_refusal_is_in_the_librarys_words_and_the_next_call_is_served(ask: Ask) -> None:
    status, told = ask("written", "root ::= there_is_no_such_rule", "root")
    assert status == REFUSED and b"there_is_no_such_rule" in told
    assert ask("written", 'root ::= "a"', "root")[0] == DONE


def test_a_result_that_is_too_large_is_told_by_its_size_alone(ask: Ask) -> None:
    text = 'root ::= "' + "a" * RESULT_BYTES + '"'
    status, size = ask("written", text, "root")
    assert status == TOO_LARGE and int(size) > RESULT_BYTES


def test_memory_that_is_refused_is_told_and_the_next_call_is_served(ask: Ask) -> None:
    assert ask("grammar", "root ::= " + "[a]?" * 29_000, "root") == (NO_MEMORY, b"")
    assert ask("written", 'root ::= "a"', "root")[0] == DONE
