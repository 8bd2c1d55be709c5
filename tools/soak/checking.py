"""Every output of an act looked at again: events against the job, the text against a fresh matcher, a share against plain decoding."""

from __future__ import annotations

import collections
import random
from dataclasses import replace

from stepgraph import Engine, FinishReason, Job, SamplingParams
from stepgraph.sampling.grammar import CompiledConstraint, Constraint, GrammarCompiler
from stepgraph.sampling.params import GREEDY
from tests.helpers.oracles import accepts
from tools.soak.asking import Ask
from tools.soak.kinds import CACHE_BYTES, PLAIN, STOP, VOCABULARY, Kind, Law, Models
from tools.soak.telling import Act, Answer, Told

COMPLETE = (FinishReason.STOP, FinishReason.CONSTRAINT_COMPLETE)
NEAR = 1e-4  # of two logits: the order of additions decides which is greater


class Checker:
    """Engines that decode plainly, and a compiler of its own, for as long as a soak lasts."""

    def __init__(self, models: Models, drawn: random.Random, plain_share: float) -> None:
        self._random, self._plain_share, self._exact = drawn, plain_share, models.device.type == "cpu"
        self._plain: dict[Law, Engine] = {law: kind.make(models) for law, kind in PLAIN.items()}
        self._compilers = {
            library: GrammarCompiler(VOCABULARY, backend=library, cache_bytes=CACHE_BYTES) for library in ("auto", "llguidance")
        }
        self.counts = collections.Counter[str]()
        for engine in self._plain.values():  # what torch loads late is there before anything is counted
            Ask((1, 2), None, None, SamplingParams(top_p=0.9), max_new_tokens=4).alone(engine)

    def close(self) -> None:
        for engine in self._plain.values():
            engine.close()
        for compiler in self._compilers.values():
            compiler.close()

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(self._plain.values())

    def check(self, kind: Kind, act: Act) -> list[str]:
        """What is wrong with an act, one line each. Answers that may be asked for again are kept."""
        problems = [*act.problems, *_check_identities(act)]
        for told in act.told:
            try:
                self._check_told(kind, act, told)
            except Exception as error:  # whatever it is, the others are looked at as well
                job = told.job
                problems.append(f"job {job.id}: {type(error).__name__}: {error}; {job.finish_reason}, {job.tokens}, {told.ask}"[:2000])
        return problems

    def _check_told(self, kind: Kind, act: Act, told: Told) -> None:
        job, ask = told.job, told.ask
        assert job.finish_reason is not None, "it has not ended"
        self.counts[f"ended: {job.finish_reason}"] += 1
        self.counts["tokens"] += len(job.tokens)
        check_events(told, act.closed)
        assert (job.finish_reason == FinishReason.ERROR) <= ask.doomed, f"an error: {job.error}"
        assert not (ask.doomed and job.tokens), "a text under a grammar that cannot be compiled"
        assert len(job.origins) == len(job.tokens) and len(job.logprobs) == len(job.tokens) * ask.sampling.logprobs
        assert len(job.tokens) == ask.max_new_tokens or (len(job.tokens) < ask.max_new_tokens and job.finish_reason != FinishReason.LENGTH)
        assert STOP not in job.tokens[:-1] or ask.sampling.ignore_eos
        if ask.constraint is not None and not ask.doomed:
            self._check_text(kind, ask, ask.constraint, job)
        if told.before is not None:
            self.counts["asked again"] += 1
            assert _agrees(job, told.before.tokens, told.before.reason), f"it said {told.before.tokens} before"
        if ask.sampling.greedy and not ask.doomed and self._random.random() < self._plain_share:
            self.counts["held against plain decoding"] += 1
            self._check_plain(kind, ask, job)
        same = ask.sampling.greedy or ask.sampling.seed is not None
        if same and job.finish_reason != FinishReason.CANCELLED and (self._exact or (kind.law == "toy" and ask.sampling.greedy)):
            act.kept.append(Answer(ask, tuple(job.tokens), str(job.finish_reason)))

    def _check_text(self, kind: Kind, ask: Ask, constraint: Constraint, job: Job) -> None:
        compiled: CompiledConstraint = self._compilers[kind.grammars].compile(constraint)
        self.counts["re-accepted by a fresh matcher"] += 1
        complete = job.finish_reason in COMPLETE
        assert accepts(compiled, job.tokens, finished=complete), "a fresh matcher does not take it"
        if complete and ask.reads is not None:
            self.counts["read by other means"] += 1
            text = VOCABULARY.decode([token for token in job.tokens if token != STOP]).decode()
            assert ask.reads(text), f"complete, but not what was asked for: {text!r}"

    def _check_plain(self, kind: Kind, ask: Ask, job: Job) -> None:
        engine = self._plain[kind.law]
        alone = ask.alone(engine)
        if _agrees(job, alone.tokens, str(alone.finish_reason)):
            return
        place = next((place for place, pair in enumerate(zip(job.tokens, alone.tokens, strict=False)) if pair[0] != pair[1]), None)
        exact = self._exact or kind.law == "toy"
        assert not exact and place is not None, f"plain decoding says {alone.tokens} {alone.finish_reason}"
        prompt = (*ask.prompt, *job.tokens[:place])
        logits = [_likelihood(engine, prompt, tokens[place]) for tokens in (job.tokens, alone.tokens)]
        assert abs(logits[0] - logits[1]) < NEAR, f"plain decoding says {alone.tokens} {alone.finish_reason}: no near tie, {logits}"
        self.counts["near ties"] += 1


def check_events(told: Told, closed: bool) -> None:
    """Once, in order, the reason at the end, and nothing behind it."""
    job, events = told.job, told.events
    tokens, reasons = [token for event in events for token in event.tokens], [event.finish_reason for event in events]
    assert all(event.job_id == job.id for event in events), "an event of another job"
    assert not any(reasons[:-1]), "an event behind the end"
    by_closing = closed and job.finish_reason == FinishReason.CANCELLED and job.error
    if told.followed == "whole" and not by_closing:
        assert tokens == job.tokens, f"the events tell {tokens}"
        assert reasons and reasons[-1] == job.finish_reason and events[-1].error == job.error, "the end was not told"
        assert [logprob for event in events for logprob in event.logprobs] == job.logprobs
        assert [origin for event in events for origin in event.origins] == job.origins
        assert sum(event.num_accepted_drafts for event in events) == job.num_accepted_drafts
    else:
        assert tokens == job.tokens[: len(tokens)], f"the events tell {tokens}"


def _check_identities(act: Act) -> list[str]:
    counts = collections.Counter(told.job.id for told in act.told)
    return [f"{count} jobs have the id {number}" for number, count in counts.items() if count > 1]


def _agrees(job: Job, tokens: tuple[int, ...] | list[int], reason: str) -> bool:
    """A job that was cancelled came only so far."""
    if job.finish_reason == FinishReason.CANCELLED:
        return job.tokens == list(tokens[: len(job.tokens)])
    return job.tokens == list(tokens) and str(job.finish_reason) == reason


def _likelihood(engine: Engine, prompt: tuple[int, ...], token: int) -> float:
    """Of one token behind a text, as a logarithm."""
    others = tuple(other for other in range(len(VOCABULARY.tokens)) if other != token)
    sampling = replace(GREEDY, bad_token_ids=others, logprobs=True)
    return Ask(prompt, None, None, sampling, max_new_tokens=1).alone(engine).logprobs[0].raw
