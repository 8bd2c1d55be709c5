"""Grammars on the device in an engine: lanes of requests, the arena, limits and errors. Equal tokens: laws/test_greedy_oracle.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepgraph import Constraint, Engine, EngineConfig, Job, SamplingParams
from stepgraph.graphs import GraphKey, TapeBackend
from stepgraph.graphs.capture import Event
from stepgraph.graphs.context import COPY_STREAM
from stepgraph.runtime.device_grammars import INT_BYTES
from stepgraph.runtime.models.toy import ToyTarget
from stepgraph.runtime.request import ActiveRequest
from stepgraph.runtime.upload import Uploader
from stepgraph.sampling import native
from stepgraph.sampling.grammar import GrammarCompiler
from stepgraph.sampling.grammar.automaton.grammar import AutomatonGrammar
from stepgraph.sampling.grammar.automaton.library import Field
from stepgraph.sampling.grammar.compile.limits import GrammarLimits
from stepgraph.sampling.grammar.link.protocol import MatcherRow
from stepgraph.sampling.params import GREEDY
from tests.helpers.failing_copies import FailingCopies
from tests.helpers.toy_engines import CONSTRAINTS, TARGET, VOCABULARY, Setup, finish, make_engine, plain, shared_engine
from tests.sampling.grammar.automaton.test_marker import BREAKS
from tools.train.saved_states import SavedStates

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())

DEVICE = Setup(k=3, grammar_backend="automaton", grammar_lane="device", buckets=(4,))
SHAPES = [Constraint.regex(f"[a-c]{{{size}}}-[0-9]{{{size}}}") for size in range(2, 9)]
ON_HOST = replace(SHAPES[0], backend="xgrammar")
COMPILER = GrammarCompiler(VOCABULARY, backend="automaton")


def submit(engine: Engine, prompt: list[int], constraint: Constraint | None, most: int, sampling: SamplingParams = GREEDY) -> Job:
    """Compiles the grammar first, so that the next step gives the request a row."""
    if constraint is not None:
        engine.compile(constraint)
    return engine.submit(prompt, constraint=constraint, max_new_tokens=most, sampling=sampling)


def image_bytes(constraint: Constraint) -> int:
    image = COMPILER.compile(constraint).image
    assert image is not None
    return -(-image.nbytes // 16) * 16


def arena_for(*constraints: Constraint) -> int:
    """Bytes of an arena with room for these grammars and no more."""
    return 16 + sum(map(image_bytes, constraints))


def test_request_uses_one_lane_and_its_batch_decides_the_graph() -> None:
    engine = shared_engine(DEVICE)
    before = {graph.key: graph.rounds for graph in engine.stats().graphs}
    first = submit(engine, [7, 1], SHAPES[5], 20)
    engine.step()
    engine.step()
    host, free = submit(engine, [7, 2], ON_HOST, 6), submit(engine, [7, 3], None, 30)
    finish(engine)
    alone = submit(engine, [7, 4], None, 4)
    finish(engine)
    asks = ((first, SHAPES[5]), (host, SHAPES[0]), (free, None), (alone, None))
    for job, constraint in asks:
        assert job.tokens == plain(job.prompt_ids, job.max_new_tokens, constraint).tokens
    assert (first.grammar_lane, host.grammar_lane, free.grammar_lane) == ("device", "host: xgrammar has no tables", "")
    rounds = {graph.key: graph.rounds - before.get(graph.key, 0) for graph in engine.stats().graphs}
    used = {(key.constrained, key.device) for key, count in rounds.items() if count}
    assert used == {(True, True), (True, False), (False, False)}, "all grammars on the device, one on the host, no grammar"


def test_device_graph_has_no_host_node_and_no_copy_for_grammars() -> None:
    with make_engine(replace(DEVICE, k=4), all_graphs=True) as engine:
        reports = {key: engine._graphs[key].report for key in (GraphKey(4, False), GraphKey(4, True, device=True), GraphKey(4, True))}
    free, device, host = reports.values()
    assert (len(free.host_nodes), len(device.host_nodes), len(host.host_nodes)) == (0, 0, 5)
    extra = {kind: device.nodes.get(kind, 0) - free.nodes.get(kind, 0) for kind in {*device.nodes, *free.nodes}}
    waits = extra.pop("wait")
    assert extra.keys() == {"kernel", "copy", "fill"} and extra["copy"] == 0, "neither copies nor host nodes"
    # One kernel per mask and one for the statuses of verification masks; fewer in total, as a masked argmax also checks for finite logits.
    assert (sum(extra.values()), waits) == (4 + 2 - 11, 10)


def test_engine_without_device_grammars_has_the_graphs_of_host_nodes_only() -> None:
    with make_engine(Setup(k=3, buckets=(4,), grammar_lane="host"), all_graphs=True) as engine:
        assert set(engine._graphs._recorded) == {GraphKey(4, True), GraphKey(4, False)}
        assert not any(name.startswith(("grammar_arena", "row_places", "row_stacks", "image_ring")) for name in engine.buffers)
        lanes = engine.stats().lanes
    assert lanes.off == "EngineConfig.grammar_lane is 'host'" and lanes.device == lanes.grammars == lanes.nbytes == 0


def test_full_arena_sends_requests_to_the_host_until_there_is_room() -> None:
    with make_engine(DEVICE, grammar_arena_bytes=arena_for(SHAPES[2], SHAPES[3]), all_graphs=True) as engine:
        jobs = [submit(engine, [4, index], SHAPES[2 + index], 25) for index in range(3)]
        finish(engine)
        assert [job.grammar_lane.split(":")[0] for job in jobs] == ["device", "device", "host"]
        assert jobs[2].grammar_lane.startswith("host: the arena is full: ") and "grammar_arena_bytes" in jobs[2].grammar_lane
        late = submit(engine, [4, 2], SHAPES[4], 25)
        finish(engine)
        assert late.grammar_lane == "device" and late.tokens == jobs[2].tokens, "both other requests have ended"
        for job, constraint in zip(jobs, SHAPES[2:], strict=False):
            assert (job.tokens, job.error) == (plain(job.prompt_ids, 25, constraint).tokens, "")
        lanes = engine.stats().lanes
        assert (lanes.device, lanes.host, lanes.arena_full) == (3, 1, 1) and lanes.evicted >= 1
        assert 'stepgraph_lane_requests_total{lane="device"} 3' in engine.metrics() and "stepgraph_arena_full_total 1" in engine.metrics()


def test_a_grammar_that_cannot_be_placed_ends_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena is full, and the row of the host link that replaces the block cannot be made."""

    def row(*_: object) -> MatcherRow:
        raise MemoryError("no memory for a matcher")

    with make_engine(DEVICE, grammar_arena_bytes=arena_for(SHAPES[2]), all_graphs=True) as engine:
        first = submit(engine, [4, 0], SHAPES[2], 25)
        engine.step()
        with monkeypatch.context() as patched:
            patched.setattr(engine._parts.host_link, "row", row)
            failed, free = submit(engine, [4, 1], SHAPES[3], 25), submit(engine, [4, 2], None, 5)
            finish(engine)
        assert (failed.finish_reason, failed.error, failed.tokens) == ("error", "MemoryError: no memory for a matcher", [])
        assert first.tokens == plain([4, 0], 25, SHAPES[2]).tokens and free.tokens == plain([4, 2], 5).tokens
        stats = engine.stats()
        assert (stats.running, stats.free_pages, dict(stats.finished)["error"]) == (0, stats.pages, 1)
        again = submit(engine, [4, 1], SHAPES[3], 25)
        finish(engine)
        assert again.tokens == plain([4, 1], 25, SHAPES[3]).tokens


def test_arena_memory_is_reused_while_rounds_of_cancelled_requests_are_in_flight() -> None:
    """The arena has room for one grammar and the device lags: the copy of the next grammar waits for rounds that read the last one."""
    pauses = iter([0.0, 0.003, 0.0, 0.001] * 10_000)
    backend = TapeBackend(asynchronous=True, delay=lambda name: time.sleep(next(pauses)))
    sizes = {image_bytes(shape) for shape in SHAPES[:3]}
    with make_engine(replace(DEVICE, rounds_in_flight=4), backend, grammar_arena_bytes=16 + max(sizes), all_graphs=True) as engine:
        kept: list[tuple[Job, Constraint]] = []
        for index in range(12):
            victim = submit(engine, [9, index], SHAPES[index % 3], 20)
            for _ in range(3):
                engine.step()
            engine.cancel(victim)
            engine.step()
            assert victim.grammar_lane == "device" and victim.finish_reason == "cancelled"
            kept.append((submit(engine, [9, index], SHAPES[(index + 1) % 3], 20), SHAPES[(index + 1) % 3]))
            finish(engine)
        for job, constraint in kept:
            assert (job.grammar_lane, job.tokens, job.error) == ("device", plain(job.prompt_ids, 20, constraint).tokens, "")


@pytest.mark.parametrize("missing", ["", "wait of the round", "wait of the copy"])
def test_copy_runs_beside_rounds_and_is_ordered_with_rounds(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """A copy starts after the rounds that may read its memory, and ends before the first round that reads what it writes."""
    log, early, asked, copy_aside = list[str](), list[bool](), list[Event](), TapeBackend.copy_aside

    def watched(self: TapeBackend, function: Callable[[], object], *, after_launched: bool) -> Event:
        reached = self.event()
        asked.append(reached)

        def copy() -> None:
            early.append(not reached.query())
            function()
            log.append("copied")

        assert after_launched, "each grammar is one part"
        return copy_aside(self, copy, after_launched=missing != "wait of the copy")

    def delay(name: str) -> None:
        until = time.monotonic() + 2
        while name == "main" and len(asked) > log.count(COPY_STREAM) and asked[-1].query() and time.monotonic() < until:
            time.sleep(0.001)  # a copy that may start does so before the next round, also on a loaded machine
        log.append(name)
        time.sleep(0.005 if name != COPY_STREAM else 0)
        rounds = log.count("main") + (8 if missing else 1)
        while (name, "copied" in log) == (COPY_STREAM, True) and missing != "wait of the copy" and log.count("main") < rounds:
            assert time.monotonic() < until
            time.sleep(0.001)  # the second copy lasts for this many rounds

    monkeypatch.setattr(TapeBackend, "copy_aside", watched)
    if missing == "wait of the round":
        monkeypatch.setattr(TapeBackend, "wait_for", lambda self, copied: None)
    backend = TapeBackend(asynchronous=True, delay=delay)
    with make_engine(replace(DEVICE, rounds_in_flight=4), backend, grammar_arena_bytes=arena_for(SHAPES[1]), all_graphs=True) as engine:
        victim, free = submit(engine, [9, 9], SHAPES[0], 40), submit(engine, [9, 8], None, 80)
        while not victim.rounds:
            engine.step()
        job = submit(engine, [*range(20, 50), *range(20, 50)], SHAPES[1], 12)  # 12 chunks: a copy thread that starts late still sees rounds
        engine.cancel(victim)
        finish(engine)
        assert (victim.grammar_lane, job.grammar_lane) == ("device", "device") and free.tokens == plain([9, 8], 80).tokens
        right = (job.tokens, job.error) == (plain(job.prompt_ids, 12, SHAPES[1]).tokens, "")
    copying = [name for start in (log.index(COPY_STREAM, log.index("copied")),) for name in log[start : log.index("copied", start)]]
    found = {"wait of the round": not right, "wait of the copy": any(early)}
    assert [name for name, seen in found.items() if seen] == ([missing] if missing else []), (job.tokens, early)
    assert missing or "main" in copying, "rounds run during the copy, between the chunks of the prompt"


def test_large_grammar_is_copied_in_parts_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepgraph.graphs.round_specs.IMAGE_CHUNK_INTS", 64)
    monkeypatch.setattr("stepgraph.graphs.round_specs.IMAGE_CHUNKS", 2)
    answers = list[bool]()
    send = Uploader.send_grammar

    def watched(self: Uploader, request: ActiveRequest) -> bool:
        answers.append(send(self, request))
        return answers[-1]

    monkeypatch.setattr(Uploader, "send_grammar", watched)
    backend = TapeBackend(asynchronous=True, delay=lambda name: time.sleep(0.002))
    with make_engine(DEVICE, backend, all_graphs=True) as engine:
        running = submit(engine, [3, 3], SHAPES[2], 20)
        while not running.rounds:
            engine.step()
        jobs = [submit(engine, [3, index], SHAPES[6], 20) for index in range(2)]
        while not jobs[0].rounds:
            engine.step()
        assert not all(answers), "the request waited for its grammar while the engine stepped"
        finish(engine)
        assert [job.tokens for job in jobs] == [plain(job.prompt_ids, 20, SHAPES[6]).tokens for job in jobs]
        assert engine.stats().lanes.grammars == 2, "both requests share one grammar"


@pytest.mark.parametrize("number", [1, 3])
def test_a_copy_that_fails_ends_only_its_request(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The next request with the grammar continues the copies; one with another grammar gets the memory."""
    monkeypatch.setattr("stepgraph.graphs.round_specs.IMAGE_CHUNK_INTS", 64)
    with make_engine(DEVICE, TapeBackend(), grammar_arena_bytes=arena_for(SHAPES[6]), all_graphs=True) as engine:
        running = submit(engine, [3, 3], None, 60)
        engine.step()
        failed = submit(engine, [3, 1], SHAPES[6], 20)
        with FailingCopies(engine.buffers.grammar_arena, number):
            engine.step()
        assert (failed.finish_reason, failed.tokens) == ("error", [])
        assert failed.error == "the grammar could not be copied to the device: OutOfMemoryError: no memory for a copy"
        for shape in (SHAPES[6], SHAPES[5], SHAPES[6]):
            job = submit(engine, [3, 1], shape, 20)
            while not job.finished:
                engine.step()
            assert (job.grammar_lane, job.tokens) == ("device", plain([3, 1], 20, shape).tokens)
        finish(engine)
        assert running.tokens == plain([3, 3], 60).tokens and engine.stats().free_pages == engine.stats().pages


@pytest.mark.parametrize("lane", ["device", "host"])
def test_text_that_nests_too_deep_ends_with_an_error_that_names_the_limit(lane: str) -> None:
    nested = Constraint.ebnf('root ::= "(" root ")" | "[" root "]" | [0-9]')
    opening = SamplingParams(temperature=0, logit_bias={VOCABULARY.tokens.index(b"("): 50.0})
    limits = GrammarLimits(automaton_depth=8)
    with make_engine(replace(DEVICE, grammar_lane=lane, greedy_only=False), grammar_limits=limits, all_graphs=True) as engine:
        deep = submit(engine, [5, 6], nested, 30, opening)
        beside = submit(engine, [5, 6], SHAPES[2], 20)
        finish(engine)
        assert deep.grammar_lane.startswith(lane) and deep.finish_reason == "error"
        assert "GrammarLimits.automaton_depth" in deep.error and "nests deeper" in deep.error
        assert 8 <= len(deep.tokens) <= 10 and VOCABULARY.decode(deep.tokens).strip(b"(") == b""
        assert (beside.error, beside.tokens) == ("", plain([5, 6], 20, SHAPES[2]).tokens)
        finished = dict(engine.stats().finished)
        assert (finished["error"], finished["refused"]) == (0, 1), "an alert on errors does not count wrong requests"


def test_wrong_tag_ends_its_request_only() -> None:
    engine = shared_engine(DEVICE)
    jobs = [submit(engine, [8, index], SHAPES[6], 24) for index in range(2)]
    engine.step()
    row = next(request.row for request in engine._scheduler.active if request.job is jobs[0])
    engine.backend.run(lambda: engine.buffers.row_tags[row].add_(77))
    finish(engine)
    assert jobs[0].finish_reason == "error" and "tag names another" in jobs[0].error
    assert (jobs[1].tokens, jobs[1].error) == (plain([8, 1], 24, SHAPES[6]).tokens, "")


def test_four_hundred_rounds_move_no_tensor_and_use_no_host_node() -> None:
    words = tuple(token for token, text in enumerate(VOCABULARY.tokens) if len(text) > 1)
    letters = SamplingParams(temperature=0, bad_token_ids=words)
    config = EngineConfig(
        max_rows=1,
        num_speculative_tokens=0,
        max_length=512,
        backend="tape",
        compile_isolation="none",
        grammar_backend="automaton",
        grammar_lane="device",
    )
    with Engine(TARGET, None, vocabulary=VOCABULARY, config=config) as engine:
        engine.capture()
        job = submit(engine, [1, 2], Constraint.regex("[a-z]{410}"), 405, letters)
        before = engine.buffers.fingerprint()
        finish(engine)
        assert (len(job.tokens), job.rounds, job.error) == (405, 405, "")
        stats = engine.backend.stats
        assert 405 <= stats.replays <= 407 and (stats.host_nodes, stats.syncs) == (0, 0) and engine.buffers.fingerprint() == before
        assert engine.stats().mask_fills == 0


def test_text_marker_is_part_of_the_tables() -> None:
    engine, ends = shared_engine(DEVICE), 0
    markers = [bytes([byte]).decode() for byte in b"abe :,0"]
    jobs = [submit(engine, [number, 2], SHAPES[1].after(marker), 40) for number, marker in enumerate(markers)]
    finish(engine)
    for number, (marker, job) in enumerate(zip(markers, jobs, strict=True)):
        expected = plain([number, 2], 40, SHAPES[1].after(marker))
        assert (job.grammar_lane, job.tokens, job.finish_reason) == ("device", expected.tokens, expected.reason)
        ends += marker.encode() in VOCABULARY.decode(job.tokens)
    assert ends > 2


def test_xgrammar_unsafe_token_is_legal_only_before_the_marker() -> None:
    """xgrammar's masks are wrong for one token of this vocabulary: grammars exclude it, and free text may contain it."""
    (hidden,), found = BREAKS.xgrammar_unsafe_ids, list[list[Job]]()
    constraint = Constraint.regex("[ab\r\n]*").after("ab")
    small = EngineConfig(max_rows=4, max_length=64, num_speculative_tokens=0)
    on_device, on_host = replace(small, grammar_lane="device"), replace(small, grammar_lane="host", grammar_backend="xgrammar")
    for lane, config in (("device", on_device), ("host", on_host)):
        with Engine(ToyTarget(BREAKS.logits_width), vocabulary=BREAKS, config=config) as engine:
            hot = (SamplingParams(temperature=5.0, seed=seed) for seed in range(24))
            found.append([submit(engine, [seed % 8], constraint, 40, sampling) for seed, sampling in enumerate(hot)])
            finish(engine)
        assert {job.grammar_lane.split(":")[0] for job in found[-1]} == {lane}
    assert [(job.tokens, job.finish_reason) for job in found[0]] == [(job.tokens, job.finish_reason) for job in found[1]]
    before, after = list[int](), list[int]()
    for job in found[0]:
        texts = [BREAKS.decode(job.tokens[:size]) for size in range(len(job.tokens))]
        for token, text in zip(job.tokens, texts, strict=True):
            (after if b"ab" in text else before).append(token)
    assert hidden in before and hidden not in after and len(after) > 100


def test_grammars_without_device_support_use_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = Constraint.regex("[0-9]{3}").after([VOCABULARY.tokens.index(b"a")])
    compiled = COMPILER.compile(SHAPES[1])
    assert isinstance(compiled.grammar, AutomatonGrammar)
    engine = shared_engine(DEVICE)
    grammars = engine._parts.grammars
    many = np.array(compiled.grammar.image)
    many[Field.PUSHES] = 5
    deep = replace(compiled, grammar=replace(compiled.grammar, image=many))
    assert grammars.why_host(compiled) == ""
    assert grammars.why_host(deep) == "a token may open 5 nested parts at once, at most 4 are supported"
    job = submit(engine, [1, 2, 65], marked, 8)
    finish(engine)
    assert job.grammar_lane == "host: the tables do not cover the marker before the grammar"
    assert job.tokens == plain([1, 2, 65], 8, marked).tokens


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"check_masks": True}, "EngineConfig.check_masks compares masks on the host"),
        ({"grammar_backend": "xgrammar"}, "grammar_backend 'xgrammar' compiles no automata"),
    ],
)
def test_unavailable_lane_is_refused_or_noted(changes: dict[str, Any], reason: str) -> None:
    setup = replace(DEVICE, **{name: value for name, value in changes.items() if name != "check_masks"})
    others: dict[str, Any] = {"check_masks": True} if "check_masks" in changes else {}
    with pytest.raises(ValueError, match=f"EngineConfig.grammar_lane: got 'device', expected 'auto' or 'host': {reason}"):
        make_engine(setup, **others, all_graphs=True)
    with make_engine(replace(setup, grammar_lane="auto", eager=True), **others) as engine:
        assert engine.stats().lanes.off == reason


def test_lane_is_noted_in_the_capture_report_and_needs_a_vocabulary_and_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(num_speculative_tokens=0, grammar_backend="automaton", grammar_lane="auto", eager=True, backend="tape")
    with Engine(TARGET, None, vocabulary=VOCABULARY, config=config) as engine:
        size = f"{config.grammar_arena_bytes:,}"
        assert f"grammar lane: device, for grammars with tables, in an arena of {size} bytes" in engine.capture().notes
    with Engine(TARGET, None, config=config) as engine:
        assert "grammar lane: host, the engine has no vocabulary" in engine.capture().notes
    monkeypatch.setattr(native, "load", lambda: native.Unavailable("not built"))
    with Engine(TARGET, None, vocabulary=VOCABULARY, config=config) as engine:
        assert "grammar lane: host, no kernel in C: not built" in engine.capture().notes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grammar_lane": "gpu"}, "EngineConfig.grammar_lane: got 'gpu', expected one of 'auto', 'device', 'host'"),
        ({"grammar_arena_bytes": 100}, "EngineConfig.grammar_arena_bytes: got 100, expected a whole number >= 1024"),
    ],
)
def test_invalid_lane_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**changes)


def test_arena_counts_among_the_static_buffers() -> None:
    sizes = []
    for arena in (1 << 20, 1 << 22):
        with make_engine(replace(DEVICE, eager=True), grammar_arena_bytes=arena) as engine:
            assert engine.buffers.grammar_arena.nbytes == arena == engine._parts.grammars.arena.size * INT_BYTES
            sizes.append(engine.buffers.nbytes - engine.buffers.image_ring_host.nbytes)
    assert sizes[1] - sizes[0] == (1 << 22) - (1 << 20)


LETTERS = tuple(token for token, text in enumerate(VOCABULARY.tokens) if b"a" in text)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, logprobs=True, top_logprobs=2)
REQUESTS: dict[str, tuple[Constraint | None, SamplingParams]] = {
    "free": (None, SAMPLED),
    "schema": (CONSTRAINTS[1], GREEDY),
    "sampled schema": (CONSTRAINTS[1], SAMPLED),
    "penalties": (CONSTRAINTS[7], replace(SAMPLED, top_k=9, min_p=0.01, repetition_penalty=1.3, frequency_penalty=0.2, min_new_tokens=9)),
    "log-probabilities": (SHAPES[2], SamplingParams(temperature=0, logprobs=True, top_logprobs=1)),
    "marker": (SHAPES[1].after("e"), GREEDY),
    "sampled marker": (SHAPES[1].after(" "), SAMPLED),
    "stop token": (SHAPES[3], SamplingParams(temperature=0, stop_token_ids=(VOCABULARY.tokens.index(b"-"),))),
    "stop string": (SHAPES[3], SamplingParams(temperature=0, stop=("-1",))),
    "dead end": (Constraint.regex("[b-c]{2}a[0-9]"), SamplingParams(temperature=0, bad_token_ids=LETTERS)),
    "recursion": (CONSTRAINTS[6], SAMPLED),
}


@pytest.mark.parametrize(
    ("drafter", "k", "changes"),
    [
        ("half", 4, {"look_up": 2, "forced_drafts": True}),
        ("control", 3, {"forced_drafts": True}),
        ("fair", 3, {"draft_masks": False}),
        ("stopper", 3, {}),
    ],
    ids=["vocabulary of its own, look-up, forced", "proposer of control tokens, forced", "unmasked", "stop tokens"],
)
def test_every_kind_of_request_has_the_results_of_host_nodes(tmp_path: Path, drafter: str, k: int, changes: dict[str, Any]) -> None:
    """Tokens, log-probabilities, origins of drafts, rounds, ends and saved hidden states."""
    found: list[dict[str, tuple[Any, dict[str, Any]]]] = []
    for lane in ("device", "host"):
        setup = replace(DEVICE, k=k, drafter=drafter, greedy_only=False, max_top_logprobs=2, grammar_lane=lane, **changes)
        with make_engine(setup, save_hidden_states=tmp_path / lane, all_graphs=True) as engine:
            jobs = {name: submit(engine, [3, 1, 4, 1 + number], ask[0], 30, ask[1]) for number, (name, ask) in enumerate(REQUESTS.items())}
            finish(engine)
        assert {job.grammar_lane.split(":")[0] for name, job in jobs.items() if name != "free"} == {lane}
        saved = {tuple(text.token_ids.tolist()): (text.features.tolist(), text.hidden.tolist()) for text in SavedStates(tmp_path / lane)}
        fields = "tokens", "text", "finish_reason", "error", "rounds", "num_accepted_drafts", "origins", "logprobs"
        states = {name: saved[job.prompt_ids + tuple(job.tokens)] for name, job in jobs.items()}
        found.append({name: (states[name], {each: getattr(job, each) for each in fields}) for name, job in jobs.items()})
    device, host = found
    for name in REQUESTS:
        assert device[name] == host[name], name
    ends = {name: result["finish_reason"] for name, (_, result) in device.items()}
    assert (ends["dead end"], ends["stop string"], ends["marker"]) == ("dead_end", "stop", "constraint_complete")
    assert sum(result["num_accepted_drafts"] for _, result in device.values()) > 20
