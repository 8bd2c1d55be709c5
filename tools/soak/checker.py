"""Checks every output of an act: events against the job, the text against a fresh matcher, a share against plain decoding."""

from __future__ import annotations

import collections
import random
from dataclasses import replace

from stepgraph import Engine, FinishReason, Job, SamplingParams
from stepgraph.sampling.grammar import CompiledConstraint, Constraint, GrammarCompiler
from stepgraph.sampling.params import GREEDY
from tests.helpers.oracles import accepts
from tools.soak.engines import CACHE_BYTES, PLAIN_KINDS, STOP, VOCABULARY, EngineKind, Models, TargetName
from tools.soak.load import Act, Answer, JobRecord
from tools.soak.requests import Request

COMPLETE_REASONS = (FinishReason.STOP, FinishReason.CONSTRAINT_COMPLETE)
NEAR_TIE = 1e-4  # difference of two logits below which summation order decides


class Checker:
    """Owns engines without drafts, and compilers."""

    def __init__(self, models: Models, rng: random.Random, plain_share: float) -> None:
        self._random, self._plain_share, self._exact = rng, plain_share, models.device.type == "cpu"
        self._plain: dict[TargetName, Engine] = {target: kind.make(models) for target, kind in PLAIN_KINDS.items()}
        self._compilers = {
            library: GrammarCompiler(VOCABULARY, backend=library, cache_bytes=CACHE_BYTES) for library in ("auto", "llguidance")
        }
        self.counts = collections.Counter[str]()
        for engine in self._plain.values():  # torch loads some modules on first use; do it before anything is counted
            Request((1, 2), None, None, SamplingParams(top_p=0.9), max_new_tokens=4).run_alone(engine)

    def close(self) -> None:
        for engine in self._plain.values():
            engine.close()
        for compiler in self._compilers.values():
            compiler.close()

    @property
    def engines(self) -> tuple[Engine, ...]:
        return tuple(self._plain.values())

    def check(self, kind: EngineKind, act: Act) -> list[str]:
        """Problems of an act, one line each. Keeps answers for repeated requests."""
        problems = [*act.problems, *_check_identities(act)]
        for record in act.records:
            try:
                self._check_job(kind, act, record)
            except Exception as error:  # check the remaining jobs as well
                job = record.job
                problems.append(
                    f"job {job.id}: {type(error).__name__}: {error}; {job.finish_reason}, {job.tokens}, {record.request}"[:2000]
                )
        return problems

    def _check_job(self, kind: EngineKind, act: Act, record: JobRecord) -> None:
        job, request = record.job, record.request
        assert job.finish_reason is not None, "the job has not ended"
        self.counts[f"ended: {job.finish_reason}"] += 1
        self.counts["tokens"] += len(job.tokens)
        check_events(record, act.closed)
        assert (job.finish_reason == FinishReason.ERROR) <= request.uncompilable, f"an error: {job.error}"
        assert not (request.uncompilable and job.tokens), "a text under a grammar that cannot be compiled"
        assert len(job.origins) == len(job.tokens) and len(job.logprobs) == len(job.tokens) * request.sampling.logprobs
        assert len(job.tokens) == request.max_new_tokens or (
            len(job.tokens) < request.max_new_tokens and job.finish_reason != FinishReason.LENGTH
        )
        assert STOP not in job.tokens[:-1] or request.sampling.ignore_eos
        if request.constraint is not None and not request.uncompilable:
            self._check_text(kind, request, request.constraint, job)
        if record.earlier is not None:
            self.counts["repeated requests"] += 1
            assert _agrees(job, record.earlier.tokens, record.earlier.reason), f"the earlier answer was {record.earlier.tokens}"
        if request.sampling.greedy and not request.uncompilable and self._random.random() < self._plain_share:
            self.counts["compared with plain decoding"] += 1
            self._check_plain(kind, request, job)
        same = request.sampling.greedy or request.sampling.seed is not None
        if same and job.finish_reason != FinishReason.CANCELLED and (self._exact or (kind.target == "toy" and request.sampling.greedy)):
            act.answers.append(Answer(request, tuple(job.tokens), str(job.finish_reason)))

    def _check_text(self, kind: EngineKind, request: Request, constraint: Constraint, job: Job) -> None:
        compiled: CompiledConstraint = self._compilers[kind.grammars].compile(constraint)
        self.counts["re-accepted by a fresh matcher"] += 1
        complete = job.finish_reason in COMPLETE_REASONS
        assert accepts(compiled, job.tokens, finished=complete), "a fresh matcher rejects the text"
        if complete and request.is_valid is not None:
            self.counts["read by other means"] += 1
            text = VOCABULARY.decode([token for token in job.tokens if token != STOP]).decode()
            assert request.is_valid(text), f"complete, but not as requested: {text!r}"

    def _check_plain(self, kind: EngineKind, request: Request, job: Job) -> None:
        engine = self._plain[kind.target]
        plain = request.run_alone(engine)
        if _agrees(job, plain.tokens, str(plain.finish_reason)):
            return
        index = next((index for index, pair in enumerate(zip(job.tokens, plain.tokens, strict=False)) if pair[0] != pair[1]), None)
        exact = self._exact or kind.target == "toy"
        assert not exact and index is not None, f"plain decoding gives {plain.tokens} {plain.finish_reason}"
        prompt = (*request.prompt, *job.tokens[:index])
        logits = [_logprob(engine, prompt, tokens[index]) for tokens in (job.tokens, plain.tokens)]
        assert abs(logits[0] - logits[1]) < NEAR_TIE, f"plain decoding gives {plain.tokens} {plain.finish_reason}: no near tie, {logits}"
        self.counts["near ties"] += 1


def check_events(record: JobRecord, closed: bool) -> None:
    """Every token once and in order, the finish reason last."""
    job, events = record.job, record.events
    tokens, reasons = [token for event in events for token in event.tokens], [event.finish_reason for event in events]
    assert all(event.job_id == job.id for event in events), "an event of another job"
    assert not any(reasons[:-1]), "an event after the end"
    by_closing = closed and job.finish_reason == FinishReason.CANCELLED and job.error
    if record.collected == "whole" and not by_closing:
        assert tokens == job.tokens, f"the events have {tokens}"
        assert reasons and reasons[-1] == job.finish_reason and events[-1].error == job.error, "no event has the finish reason"
        assert [logprob for event in events for logprob in event.logprobs] == job.logprobs
        assert [origin for event in events for origin in event.origins] == job.origins
        assert sum(event.num_accepted_drafts for event in events) == job.num_accepted_drafts
    else:
        assert tokens == job.tokens[: len(tokens)], f"the events have {tokens}"


def _check_identities(act: Act) -> list[str]:
    counts = collections.Counter(record.job.id for record in act.records)
    return [f"{count} jobs have the id {number}" for number, count in counts.items() if count > 1]


def _agrees(job: Job, tokens: tuple[int, ...] | list[int], reason: str) -> bool:
    """A cancelled job has a prefix of the tokens."""
    if job.finish_reason == FinishReason.CANCELLED:
        return job.tokens == list(tokens[: len(job.tokens)])
    return job.tokens == list(tokens) and str(job.finish_reason) == reason


def _logprob(engine: Engine, prompt: tuple[int, ...], token: int) -> float:
    """Log-probability of a token after a prompt."""
    others = tuple(other for other in range(len(VOCABULARY.tokens)) if other != token)
    sampling = replace(GREEDY, bad_token_ids=others, logprobs=True)
    return Request(prompt, None, None, sampling, max_new_tokens=1).run_alone(engine).logprobs[0].raw
