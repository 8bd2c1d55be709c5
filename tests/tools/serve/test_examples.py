"""The examples run as they stand, README's of serving too."""

from __future__ import annotations

import asyncio
import re
import textwrap
from typing import Any

import pytest

from stepgraph import AsyncEngine, Constraint, FinishReason, Vocabulary
from tests.helpers.documents import snippet
from tests.helpers.toy_engines import VOCABULARY, Setup, make_engine
from tools.serve.examples import async_stream, sync_loop


def test_the_synchronous_loop(capsys: pytest.CaptureFixture[str]) -> None:
    jobs, vocabulary = sync_loop.main(), Vocabulary.printable()
    printed = capsys.readouterr().out.splitlines()
    assert [job.prompt_ids for job in jobs.values()] == [(1, 2, 3), (4, 5), (6,)]
    date, free, choice = jobs.values()
    assert re.fullmatch(rb"20\d\d-[01]\d-[0-3]\d", vocabulary.decode(date.tokens))
    assert vocabulary.decode(choice.tokens) in (b"yes", b"no", b"perhaps")
    assert free.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    for job in jobs.values():
        assert sum(f"job {job.id}: " in line for line in printed) == job.rounds
        assert sum(line.startswith(f"job {job.id}: ") and line.endswith(f" {job.finish_reason}") for line in printed) == 1


def test_the_asynchronous_streams(capsys: pytest.CaptureFixture[str]) -> None:
    whole, enough, late = asyncio.run(async_stream.main())
    printed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rb"[a-z]{3,12} \d{4}", async_stream.VOCABULARY.decode(whole.tokens))
    assert (enough.finish_reason, late.finish_reason) == (FinishReason.CANCELLED, FinishReason.CANCELLED)
    assert 10 <= len(enough.tokens) < 1000
    assert printed[-3:] == [f"job {job.id}: {len(job.tokens)} tokens, {job.finish_reason}" for job in (whole, enough, late)]


def test_the_one_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    with make_engine(Setup(k=2, eager=True)) as engine:
        namespace: dict[str, Any] = {"AsyncEngine": AsyncEngine, "engine": engine, "vocabulary": VOCABULARY, "prompt_ids": [1, 2]}
        namespace["constraint"] = Constraint.regex("[a-c]{4,9}")
        exec("async def main():\n" + textwrap.indent(snippet("AsyncEngine(engine)"), "    "), namespace)
        asyncio.run(namespace["main"]())
        assert not engine.has_work
    assert re.fullmatch("[a-c]{4,9}", "".join(re.findall("b'(.*)'", capsys.readouterr().out)))
