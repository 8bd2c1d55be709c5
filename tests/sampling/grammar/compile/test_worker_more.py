"""Grammars at the edges: workers that are stopped or not wanted any more, refusals that cannot be taken out, bytes without a token."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from stepgraph.sampling.grammar import Constraint, GrammarLimits, Vocabulary
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker, WorkerError
from stepgraph.sampling.grammar.link.llguidance_binding import LLGuidanceTokenizer, llguidance_api
from stepgraph.sampling.grammar.matchers.forced import TokenTable
from tests.helpers.grammar_texts import PRINTABLE


@pytest.fixture
def worker() -> Iterator[CompileWorker]:
    worker = CompileWorker(PRINTABLE, GrammarLimits(compile_seconds=1.0), 1)
    yield worker
    worker.close()


def test_a_worker_that_was_stopped_is_given_up_and_the_next_call_has_another(worker: CompileWorker) -> None:
    """Its own timer does not run then."""
    assert worker.call("written", 'root ::= "a"', "root").startswith("root ::=")
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match=r"GrammarLimits\.compile_seconds: got no answer from the compile worker, want at most 1\.0 s"):
        worker.call("written", 'root ::= "b"', "root")
    assert worker.pid is None and worker.call("written", 'root ::= "b"', "root").startswith("root ::=") and worker.started == 2


def test_what_is_cancelled_before_there_is_a_process_is_not_compiled(worker: CompileWorker) -> None:
    worker.kill()
    with pytest.raises(WorkerError, match="the compile was cancelled, before it was ready"):
        worker.call("written", 'root ::= "a"', "root")
    worker.begin()
    assert worker.call("written", 'root ::= "a"', "root").startswith("root ::=")


def test_a_refusal_that_cannot_be_taken_out_is_the_last_one() -> None:
    told = Constraint.json_schema({"anyOf": [5, {"type": "string", "pattern": 1}]}).coverage()
    assert told.backend is None
    assert {name: [refusal.where for refusal in found] for name, found in told.refusals.items()} == {
        "xgrammar": ["#/anyOf/0"],
        "llguidance": ["#/anyOf/0"],
    }


def test_a_grammar_that_the_c_api_refuses_is_told_in_its_words() -> None:
    tokenizer = LLGuidanceTokenizer(llguidance_api(), PRINTABLE)
    with pytest.raises(ValueError, match='unknown name: "nothing"'):
        tokenizer.grammar("start: nothing", {})


def test_a_text_with_a_byte_that_no_token_has_is_not_split() -> None:
    table = TokenTable(Vocabulary([b"a", b"ab", b"b", b""], stop_token_ids=[3]))
    assert table.split(b"aba") == [1, 0] and table.split(b"abc") == []


def test_a_vocabulary_is_shown_by_its_size() -> None:
    assert repr(Vocabulary([b"a", b""], stop_token_ids=[1])) == "Vocabulary(2 tokens, stop_token_ids=(1,), logits_width=2)"
