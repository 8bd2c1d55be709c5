"""The example programs run."""

from __future__ import annotations

import asyncio
import re

import pytest

from stepgraph import FinishReason, Vocabulary
from tools.examples import async_stream, sync_loop


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
