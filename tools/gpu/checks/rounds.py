"""Checks of the decode round and the engine with the toy pair: tokens, launches, memory."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial
from typing import get_args

import torch

from stepgraph import Constraint, EngineConfig, Job
from stepgraph.graphs import GraphKey
from stepgraph.graphs.limits import RoundsPerLaunch
from stepgraph.runtime.models.ngram import NgramLookup
from stepgraph.sampling.kernels.triton import why_no_triton
from tests.helpers.oracles import accepts, greedy
from tools.gpu.checks.context import (
    CONSTRAINTS,
    ORACLE_TARGET,
    STOP,
    VOCABULARY,
    Context,
    Figures,
    RandomRequest,
    Skipped,
    compiled,
    outcome,
    random_requests,
    serve,
    toy_draft,
    toy_target,
)
from tools.gpu.checks.states import ROWS, RoundBench


def replay_equals_eager(context: Context) -> Figures:
    """Replays equal eager runs bit for bit: every stage by itself and the whole round for every key, from random states."""
    states, compared = 1 if context.rehearsal else context.count(4, 2), 0
    kinds = list(itertools.product((False, True), (False, True)))[:: 3 if context.rehearsal else 1]  # constrained, sampled
    with context.backend() as backend:
        bench = RoundBench(backend, 3)
        for kind in kinds:
            steps = bench.stage_steps(*kind)
            compared += sum(bench.compare(step, states) for step in steps.values())
    shapes = [(0, True), (1, True), (3, True), (3, False), (8, True), (8, False)]
    for k, draft_masks in shapes[2:3] if context.rehearsal else shapes:
        if not context.fits(f"K={k}, draft_masks={draft_masks}"):
            continue
        with context.backend() as backend:
            bench = RoundBench(backend, k, draft_masks)
            for rows, (constrained, sampled) in itertools.product((1, ROWS), kinds):
                push_batch = partial(bench.push_batch, rows) if constrained else lambda: None
                compared += bench.compare(bench.round.step(GraphKey(rows, constrained, sampled)), states, push_batch)
    drafters = (NgramLookup(), False, None), (NgramLookup(), True, None), (None, True, None), (None, True, NgramLookup(min_ngram=2))
    for proposer, forced_drafts, look_up in drafters[3:] if context.rehearsal else drafters:
        if not context.fits(f"{proposer}, forced_drafts={forced_drafts}, look_up={look_up is not None}"):
            continue
        with context.backend() as backend:
            bench = RoundBench(backend, 4, proposer=proposer, forced_drafts=forced_drafts, look_up=look_up)
            for kind in kinds:
                push_batch = partial(bench.push_batch, ROWS) if kind[0] else lambda: None
                compared += bench.compare(bench.round.step(GraphKey(ROWS, *kind)), states, push_batch)
    for forced_drafts in (True,) if context.rehearsal else (False, True):
        if not context.fits(f"grammars on the device, forced_drafts={forced_drafts}"):
            continue
        if not context.on_tape and why_no_triton(context.device):
            continue
        with context.backend() as backend:
            bench = RoundBench(backend, 3, forced_drafts=forced_drafts, device_grammars=True)
            for sampled, device in itertools.product((False, True), (False, True)):
                push_batch = (lambda: None) if device else partial(bench.push_batch, ROWS)
                compared += bench.compare(bench.round.step(GraphKey(ROWS, True, sampled, device)), states, push_batch)
    return {"replays_compared": compared, "stages": sorted(steps)}


def _allocations(context: Context) -> int:
    return 0 if context.on_tape else int(torch.cuda.memory_stats(context.device)["allocation.all.allocated"])


def no_sync_no_allocation(context: Context) -> Figures:
    """A hundred replays of each kind of round: no wait, no allocation, no buffer moved."""
    replays = 20 if context.rehearsal else 100
    with context.backend(asynchronous=True) as backend:
        bench = RoundBench(backend, 4)
        keys = [GraphKey(ROWS, *kind) for kind in itertools.product((True, False), (True, False))]
        recorded = {key: backend.capture(bench.round.step(key), bench.buffers) for key in keys}
        bench.randomise(1)
        if not context.on_tape:
            torch.cuda.synchronize()
        pointers, syncs = bench.buffers.fingerprint(), backend.stats.syncs
        for key, graph in recorded.items():
            assert graph.report.nodes.get("copied", 0) == 0, "an operation without an out= overload allocates at every replay"
            allocated = _allocations(context)
            with context.no_sync():
                for _ in range(replays):
                    if key.constrained:
                        bench.host.push_batch([None] * ROWS)
                    graph.replay()
            assert _allocations(context) == allocated, "a replay allocated"
        assert backend.stats.syncs == syncs
        backend.synchronize()
        assert bench.buffers.fingerprint() == pointers, "a buffer moved"
        return {"replays": len(keys) * replays, "counted": backend.stats.replays}


def one_replay_per_round(context: Context) -> Figures:
    """One graph launch per round and no wait for the whole device, by the backend's counters."""
    with context.engine(4) as engine:
        serve(engine, random_requests(0, 2, 4))
        before = engine.stats()
        serve(engine, random_requests(1, context.count(12, 5), 4))
        after = engine.stats()
    rounds, waits = after.rounds - before.rounds, after.event_waits - before.event_waits
    assert after.replays - before.replays == rounds > 0
    assert after.host_syncs == before.host_syncs
    unread = engine.limits.rounds_in_flight  # rounds without a live row, whose results are not read
    assert waits >= rounds - unread, "results of a round were read without waiting"
    return {"rounds": rounds, "event_waits": waits, "tokens": after.tokens - before.tokens}


def one_launch_per_answer(context: Context) -> Figures:
    """Launches of many rounds: one per answer, free and with a grammar on the device, and the tokens of one round per launch."""
    if not context.on_tape and why_no_triton(context.device):
        raise Skipped(why_no_triton(context.device))
    reqs = random_requests(3, context.count(12, 3), 3)
    tokens, launches = list[list[tuple[list[int], str, str]]](), list[int]()
    for rounds in get_args(RoundsPerLaunch):
        config = EngineConfig(
            max_rows=4,
            num_speculative_tokens=3,
            draft_length=3,
            max_length=96,
            page_size=8,
            buckets=(4,),
            greedy_only=True,
            grammar_lane="device",
            compile_isolation="none",
            rounds_per_launch=rounds,
        )
        with context.engine_of(toy_target(context.device), toy_draft(context.device, 0.7), config) as engine:
            jobs = []
            for constraint in (None, Constraint.regex("[a-c]{20}-[0-9]{9}")):
                if constraint:
                    engine.compile(constraint)
                before = engine.stats().replays
                jobs.append(engine.generate([7, 1], max_new_tokens=60, constraint=constraint))
                launches.append(engine.stats().replays - before)
            tokens.append([outcome(job) for job in (*jobs, *serve(engine, [req._replace(cancel_after=None) for req in reqs]))])
    assert tokens[0] == tokens[1]
    assert launches[2:] == [1, 1]
    return {"launches_of_single_rounds": launches[:2], "launches_of_loops": launches[2:], "answers": len(tokens[0])}


def profiler_counts_one_launch_per_round(context: Context) -> Figures:
    """One cudaGraphLaunch per round in torch's profiler; on the tape, one replay per round. Prompts have no graphs here."""
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (not context.on_tape)
    with context.engine(4, prompt_graphs=False) as engine:
        serve(engine, random_requests(0, 2, 4))
        before = engine.stats()
        with torch.profiler.profile(activities=activities) as profile:
            serve(engine, random_requests(1, context.count(12, 2), 4))
        after = engine.stats()
    rounds = after.rounds - before.rounds
    names = Counter(event.name for event in profile.events() or ())
    if context.on_tape:
        names["cudaGraphLaunch"] = after.replays - before.replays
    elif not any(name.startswith("cuda") for name in names):
        raise Skipped("the profiler sees no CUDA calls on this machine")
    assert names["cudaGraphLaunch"] == rounds, f"{names['cudaGraphLaunch']} launches in {rounds} rounds"
    watched = ("cudaGraphLaunch", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMalloc", "cudaMemcpyAsync", "cudaLaunchKernel")
    return {"rounds": rounds, **{name: names[name] for name in watched}}


def _expected(req: RandomRequest) -> tuple[list[int], str]:
    answer = greedy(ORACLE_TARGET, req.prompt, req.max_new_tokens, (STOP,), compiled(req.constraint), len(VOCABULARY.tokens))
    return answer.tokens, answer.reason


def check_against_oracle(req: RandomRequest, job: Job) -> None:
    tokens, reason = _expected(req)
    if str(job.finish_reason) == "cancelled":
        assert job.tokens == tokens[: len(job.tokens)], f"{req}: got {job.tokens}, expected a prefix of {tokens}"
    else:
        assert outcome(job) == (tokens, reason, ""), f"{req}: got {outcome(job)}, expected {tokens}, {reason}"
    grammar = compiled(req.constraint)
    if grammar is not None:
        assert accepts(grammar, job.tokens, finished=str(job.finish_reason) == "constraint_complete")


def engine_matches_oracle(context: Context) -> Figures:
    """Random requests and cancels, K 0 to 4, masked drafts and not: every job equals plain greedy decoding."""
    jobs = tokens = drafts = 0
    kinds = [(4, True), (3, False), (1, True), (0, True)]  # required; of the others as many as the budget allows
    others = [kind for kind in itertools.product(range(4, -1, -1), (True, False)) if kind not in kinds]
    for k, draft_masks in kinds[:2] if context.rehearsal else kinds + others:
        if (k, draft_masks) not in kinds and not context.fits(f"K={k}, draft_masks={draft_masks}"):
            continue
        with context.engine(k, draft_masks=draft_masks, buckets=k == 4) as engine:
            for seed in context.turns(context.count(4, 1)):
                reqs = random_requests(100 * k + seed, 8, k)
                for req, job in zip(reqs, serve(engine, reqs), strict=True):
                    check_against_oracle(req, job)
                    jobs += 1
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, engine.limits.num_pages)
            tokens, drafts = tokens + stats.tokens, drafts + stats.drafts.accepted
    return {"jobs": jobs, "tokens": tokens, "accepted_drafts": drafts}


def unconstrained_graph_has_no_host_nodes(context: Context) -> Figures:
    """Graphs of batches without grammars have no host nodes; with grammars K + 1, or one if drafts are not masked."""
    figures: Figures = {}
    for k, draft_masks, expected in ((0, True, 1), (1, True, 2), (4, True, 5), (4, False, 1)):
        with context.backend() as backend:
            bench = RoundBench(backend, k, draft_masks)
            for constrained in (False, True):
                report = backend.capture(bench.round.step(GraphKey(2, constrained)), bench.buffers).report
                want = expected if constrained else 0
                assert len(report.host_nodes) == want, f"K={k}: got {report.host_nodes}, expected {want}"
                assert report.nodes.get("host", 0) == want, f"K={k}: got {report.nodes}, expected {want} of kind host"
                figures[f"K={k} masks={draft_masks} {'constrained' if constrained else 'free'}"] = sum(report.nodes.values())
    return figures


def several_engines(context: Context) -> Figures:
    """Two engines alternate in one process."""
    with context.engine(2) as first, context.engine(3, draft_masks=False) as second:
        reqs = {engine: [req._replace(cancel_after=None) for req in random_requests(k, 6, k)] for engine, k in ((first, 2), (second, 3))}
        jobs = [
            (
                req,
                engine.submit(req.prompt, constraint=req.constraint, max_new_tokens=req.max_new_tokens, num_speculative_tokens=req.drafts),
            )
            for engine, batch in reqs.items()
            for req in batch
        ]
        while first.has_work or second.has_work:
            for engine in (first, second):
                if engine.has_work:
                    engine.step()
        for req, job in jobs:
            check_against_oracle(req, job)
        assert any(req.constraint is not None for req, _ in jobs) and len(CONSTRAINTS) > 1
        return {"jobs": len(jobs)}
