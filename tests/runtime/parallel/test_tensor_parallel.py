"""Ranks of a tensor-parallel engine, each a process, against one process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from stepgraph import AsyncEngine, Constraint, Engine, EngineConfig, FinishReason, Job, LogitsProcessor, ProcessorInput, SamplingParams
from stepgraph.graphs import BufferSpec, StaticBuffers, capture, run_eager
from stepgraph.graphs.layers import parallel, rank_sums
from stepgraph.graphs.layers.dense import Residual, add_rms_norm
from stepgraph.graphs.layers.parallel import RankGroups, register_group, sum_over_ranks
from stepgraph.graphs.layers.vocabulary_shard import VocabularyShard
from stepgraph.graphs.limits import Limits
from stepgraph.runtime.models.draft_llama import DraftLlama
from stepgraph.runtime.models.files.checkpoint import WeightsMode
from stepgraph.runtime.models.files.weights import SafetensorsSource
from stepgraph.runtime.parallel.loading import load_part
from stepgraph.runtime.parallel.lockstep import LockstepQueue, LockstepScheduler, StepDecision
from stepgraph.runtime.parallel.ranks import RANK_MODULE, STEPS_PER_COMPARISON, RankError, Ranks, process_group
from stepgraph.runtime.request_queue import QueuedRequest, RequestQueue
from stepgraph.runtime.row_table import PrefixSharing
from stepgraph.runtime.serve.http import Bounds
from tests.helpers import parallel_program
from tests.helpers.c_library import needs_c
from tests.helpers.command_models import model_folder, model_gguf
from tests.helpers.draft_engines import DraftCase
from tests.helpers.families import BASE, folder_of, random_model, save
from tests.helpers.parallel_program import OPTIONS, PROCESSORS, decode, open_engine, option_requests, results, target_of
from tests.helpers.running_server import CHAT, FORMAT, ON, SCHEMA, engine_of, running
from tests.runtime.models.files.test_quantised_folder import LAYOUTS
from tests.runtime.models.files.test_quantised_folder import write as write_quantised

PROGRAM = "tests.helpers.parallel_program"
SECONDS = 5.0
soak = pytest.mark.soak
slow = pytest.mark.slow


@contextlib.contextmanager
def programs(folders: list[Path], draft: str, counts: tuple[int, ...] = (8, 8), size: int = 2, **changes: Any) -> Iterator[list[Any]]:
    """Starts one program per folder; two programs run in the environment of torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(folders))} if len(folders) > 1 else {}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(folder), draft, str(size), json.dumps(changes | {"count": counts[rank]})],
            env=os.environ | shared | ({"RANK": str(rank)} if shared else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, folder in enumerate(folders)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def result(process: subprocess.Popen[str]) -> Any:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


@functools.cache
def alone(draft: str) -> dict[str, Any]:
    return decode(model_folder(), draft, 1)


@slow
def test_a_rank_reads_and_keeps_its_part_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank reads its part, and the first rows of all tensors to compare them. Norms are not divided."""
    source, read, size = SafetensorsSource(model_folder()), list[int](), 2
    norms = sum(source.read(name).nbytes for name in source.tensors if "norm" in name)
    divided = [
        source.read(name).nbytes // size for name in source.tensors if "norm" not in name and "embed" not in name and "head" not in name
    ]
    tables = [source.read(name) for name in source.tensors if "embed" in name or "lm_head" in name]
    first_rows = [source.read(name)[: 1 if "norm" not in name else None].nbytes for name in source.tensors]
    real_read = SafetensorsSource.read

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        read.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(SafetensorsSource, "read", lambda self, *part: counted(real_read(self, *part)))
    with open_engine(model_folder(), "none", size) as engine:
        target = target_of(engine)
        tokens = engine._parts.limits.num_tokens
        parts = [
            norms + sum(divided) + sum(table[tokens * rank // size : tokens * (rank + 1) // size].nbytes for table in tables)
            for rank in range(size)
        ]
        assert sum(parameter.nbytes for parameter in target.parameters()) == parts[0]
    assert sum(read) == parts[0] + sum(first_rows)


def ranks_of(engine: Engine) -> Ranks:
    assert engine._parts.ranks is not None
    return engine._parts.ranks


@pytest.mark.parametrize(
    ("size", "draft"), [(2, "ngram"), *(pytest.param(*case, marks=soak) for case in ((2, "none"), (4, "ngram"), (4, "none")))]
)
def test_ranks_give_the_tokens_of_one_process(size: int, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain, sampled and with grammars, with and without drafts; twice, so that prompts share pages; then one rank has other results."""
    monkeypatch.setattr(VocabularyShard, "whole", None)  # no rank gathers the logits of all tokens
    with open_engine(model_folder(), draft, size) as engine:
        processes = ranks_of(engine).processes
        for _ in range(2):
            found = results(engine)
            assert found["jobs"] == alone(draft)["jobs"] and not found["error"]
        assert found["weights"] < alone(draft)["weights"]
        whole = engine.generate([1, 2, 3], max_new_tokens=20)
        assert engine.generate([1, 2, 3], max_new_tokens=20, resume_from=whole.tokens[:5]).tokens == whole.tokens[5:]
        with pytest.raises(ValueError, match=r"Engine\.reset_prefix_cache: got an engine with tensor_parallel, expected one without it"):
            engine.reset_prefix_cache()
        ranks_of(engine).note("another result")
        job = engine.submit([1, 2, 3], max_new_tokens=60, num_speculative_tokens=0)
        with pytest.raises(RankError, match="the results of earlier steps differ"):
            list(engine.stream())
        assert job.finish_reason == FinishReason.ERROR and len(job.tokens) <= STEPS_PER_COMPARISON
    assert len(processes) == size - 1 and all(process.poll() is not None for process in processes)


@functools.cache
def words() -> tuple[tuple[int, ...], ...]:
    """Bad words of one to three tokens, from the text that the first of `option_requests` has without them."""
    with open_engine(model_folder(), "none", 1) as engine:
        tokens = engine.generate([5, 6, 7, 5, 6, 7, 5, 6], max_new_tokens=24).tokens
    return tuple(tuple(tokens[start : start + length]) for start, length in ((2, 1), (5, 2), (8, 3), (12, 2), (15, 3), (19, 2)))


@functools.cache
def options_alone(draft: str) -> list[Job]:
    return decode_options(draft, 1)


def decode_options(draft: str, size: int) -> list[Job]:
    with open_engine(model_folder(), draft, size, logits_processors=PROCESSORS, **OPTIONS) as engine:
        jobs = [engine.submit(max_new_tokens=24, **request) for request in option_requests(words())]
        for _ in engine.stream():
            pass
        assert draft == "none" or engine.stats().drafts.accepted_relaxed > 5
    return jobs


@slow
@pytest.mark.parametrize(
    ("size", "draft"), [(2, "ngram"), *(pytest.param(*case, marks=soak) for case in ((2, "none"), (4, "ngram"), (4, "none")))]
)
def test_sampling_options_give_the_results_of_one_process(size: int, draft: str) -> None:
    """Bad words, relaxed acceptance, the most probable tokens, and functions over all logits."""
    for job, expected in zip(decode_options(draft, size), options_alone(draft), strict=True):
        assert (job.tokens, job.origins, job.error) == (expected.tokens, expected.origins, "")
        assert len(job.tokens) == 24 or job.constraint
        entries = ([each for each in (*of.logprobs, *of.prompt_logprobs) if each] for of in (job, expected))
        for one, other in zip(*entries, strict=True):
            assert one[:2] == pytest.approx(other[:2], abs=1e-5)
            for found, ranked in zip(one[2:], other[2:], strict=True):
                assert [token for token, _ in found] == [token for token, _ in ranked]
                assert [value for _, value in found] == pytest.approx([value for _, value in ranked], abs=1e-5)


@pytest.mark.parametrize(
    ("size", "family"),
    [
        pytest.param(2, "gpt-oss", marks=slow),
        *(pytest.param(2, family, marks=soak) for family in ("mistral", "qwen2", "phi-3, with a window", "qwen3-moe, shares as they are")),
        *(pytest.param(2, family, marks=soak) for family in ("deepseek-v3", "deepseek-v3, queries of the hidden state", "glm-4.5")),
        *(
            pytest.param(4, family, marks=soak)
            for family in ("qwen3", "gemma-3", "mixtral", "gpt-oss", "phi-4-mini", "llama, biases, head size of its own")
        ),
    ],
)
def test_families(size: int, family: str) -> None:
    """Windows, biases, sinks, norms of heads, norms of outputs, experts, latent attention."""
    require_equal_tokens(folder_of(family), "ngram", size)


LAYERS = BASE | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("layout", "weights", "size"),
    [
        pytest.param("AWQ", "quantised", 2, marks=slow),
        *(pytest.param(layout, "quantised", 2, marks=soak) for layout in LAYOUTS if layout != "AWQ"),
        *(pytest.param(layout, "dequantised", 4, marks=soak) for layout in LAYOUTS),
    ],
)
@needs_c
def test_quantised_folders(layout: str, weights: WeightsMode, size: int, tmp_path: Path) -> None:
    """Each rank keeps its part of the numbers."""
    write_quantised(tmp_path, layout, random_model("Llama", LAYERS, seed=1))
    require_equal_tokens(tmp_path, "ngram", size, weights=weights)
    if weights == "quantised":
        kept = []
        for ranks in (1, size):
            with open_engine(tmp_path, "none", ranks, weights) as engine:
                layers = target_of(engine).layers.named_parameters()
                kept.append({name: parameter.nbytes for name, parameter in layers if parameter.dtype is torch.uint8})
        assert kept[1] == {name: nbytes // size for name, nbytes in kept[0].items()} and len(kept[1]) == 8


@slow
def test_a_tensor_parallel_server_answers_like_a_server_of_one_process(tmp_path: Path) -> None:
    """The chat template ends with <think>, a control token that the server turns into text on every rank; a grammar follows it."""
    folder = Path(shutil.copytree(model_folder(), tmp_path / "model"))
    change_json(
        folder / "tokenizer.json", lambda found: next(t for t in found["added_tokens"] if t["content"] == "<think>").update(special=True)
    )
    change_json(folder / "tokenizer_config.json", lambda found: found.update(chat_template=found["chat_template"] + "{{ '<think>' }}"))
    flags = ["serve", str(folder), *"--eager -k 2 --draft-length 2 --max-rows 2 --max-length 512 --round-timeout-seconds 20".split()]
    request: Any = {"model": "toy", "messages": CHAT, "max_tokens": 60, "logprobs": True, "top_logprobs": 3, "seed": 5}
    choices = list[Any]()
    for size in (1, 2):
        with (
            engine_of([*flags, "--tensor-parallel", str(size)]) as engine,
            running(engine, Bounds(), ["none"]) as server,
            server.client as client,
        ):
            assert b"<think>" in engine.vocabulary.tokens and engine.config.round_timeout_seconds == 20
            body = {"thinking_token_budget": 8, "priority": 3}
            asked = client.chat.completions.create(**request, response_format=FORMAT, temperature=0.7, extra_body=body)
            choices.append([asked.choices[0], client.chat.completions.create(**request, temperature=0).choices[0]])
    for one, other in zip(*choices, strict=True):
        assert one.message == other.message and one.finish_reason == other.finish_reason
        for found, expected in zip(one.logprobs.content, other.logprobs.content, strict=True):
            assert [each.token for each in found.top_logprobs] == [each.token for each in expected.top_logprobs]
    jsonschema.validate(json.loads(choices[0][0].message.content), SCHEMA)


def change_json(path: Path, change: Callable[[Any], object]) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    change(found)
    path.write_text(json.dumps(found), encoding="utf-8")


@soak
@needs_c
def test_quantised_experts(tmp_path: Path) -> None:
    fields = LAYERS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    write_quantised(tmp_path, "FP8 per channel", random_model("Mixtral", fields, seed=1))
    require_equal_tokens(tmp_path, "ngram", 2, weights="quantised")


@needs_c
def test_parts_of_less_than_a_group_stay_quantised_on_one_rank_only(tmp_path: Path) -> None:
    write_quantised(tmp_path, "AWQ")
    expected = r"tensor_parallel: got 2 with weights='quantised', expected parts of whole tiles and groups: .*o_proj.*\(128, 64\)"
    with pytest.raises(ValueError, match=expected):
        open_engine(tmp_path, "none", 2, "quantised")


@soak
@pytest.mark.parametrize(("size", "name"), [(2, "eagle3"), (4, "model"), (2, "mtp")])
def test_draft_models(size: int, name: str) -> None:
    drafter = DraftCase(name, "qwen3")
    for constraint in (None, Constraint.regex("[a-f0-9]{6,30}")):
        accepted = require_equal_tokens(drafter.target, drafter.draft, size, constraint=constraint)
        assert accepted[0] == accepted[1]


@soak
@pytest.mark.parametrize("size", [2, 4])
def test_draft_models_with_large_layers_are_divided(size: int, tmp_path: Path) -> None:
    """The target is its own draft, so an error of the draft would lower the acceptance rate."""
    fields = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 2, "num_key_value_heads": 4}
    folder = save(random_model("Llama", BASE | fields, seed=2), tmp_path)
    accepted = require_equal_tokens(folder, folder, size)
    assert accepted[0] == accepted[1] and min(accepted[0]) > 20
    kept = []
    for ranks in (1, size):
        with open_engine(folder, folder, ranks) as engine:
            draft = engine._parts.models.draft
            assert isinstance(draft, DraftLlama)
            matrices = sum(parameter.nbytes for parameter in draft.layers.parameters() if parameter.dim() == 2)
            kept.append((matrices, engine._parts.buffers.draft_keys.nbytes))
    assert kept[1] == tuple(nbytes // size for nbytes in kept[0])


@soak
def test_forced_drafts() -> None:
    accepted = require_equal_tokens(model_folder(), "forced", 2, constraint=Constraint.choice(["abcdefgh", "xyzwvuts"]))
    assert accepted[0] == accepted[1] and min(accepted[0])


def require_equal_tokens(
    target: Path, draft: str | Path, size: int, weights: WeightsMode = "dequantised", **options: Any
) -> list[list[int]]:
    """Compares one process with `size` ranks, greedy and sampled. Returns the numbers of accepted drafts of both."""
    found, accepted = [], []
    for ranks in (1, size):
        with open_engine(target, draft, ranks, weights) as engine:
            prompts, sampling = [[5, 6, 7, 5, 6], [9, 8]], SamplingParams(temperature=0.4, seed=4, top_k=60, top_p=0.95)
            jobs = engine.generate(prompts, max_new_tokens=40, **options)
            jobs += engine.generate(prompts, max_new_tokens=40, sampling=sampling, **options)
            found.append([job.tokens for job in jobs])
            accepted.append([job.num_accepted_drafts for job in jobs])
    assert found[0] == found[1]
    return accepted


@slow
def test_layers_whose_sums_include_the_norm_give_the_tokens_of_one_process() -> None:
    """FlashInfer fuses sum and norm on a GPU. Here the first rank does so, with the messages of the unfused sum."""

    class WithNorm(parallel.GatherSum):
        def __init__(self, number: int, unfused: parallel.GatherSum) -> None:
            super().__init__(unfused.group, unfused.seconds)
            self.fused_add_rms_norm, self.number, self.calls = self._fused_add_rms_norm, number, 0

        def _fused_add_rms_norm(self, states: torch.Tensor, part: torch.Tensor, weight: torch.Tensor, epsilon: float) -> Residual:
            self.calls += 1
            sum_over_ranks.out(part, self.number)
            return add_rms_norm(states, part, weight, epsilon)

    with open_engine(model_folder(), "ngram", 2) as engine:
        groups = ranks_of(engine).groups
        sums = [WithNorm(*each) for each in zip((groups.graph, groups.eager), groups.members, strict=True)]
        parallel.set_sums(groups, sums)
        found = results(engine)
        assert found["jobs"] == alone("ngram")["jobs"] and not found["error"]
        assert sums[0].calls and not sums[0].calls % (2 * len(target_of(engine).layers))


@pytest.mark.parametrize("size", [pytest.param(2, marks=slow), pytest.param(4, marks=soak)])
def test_priorities_and_tenants_have_the_order_of_one_process(size: int) -> None:
    """Requests arrive in parts, between steps, while rows are taken."""
    asks = [(index % 3 - 1, "aab"[index % 3] if index < 9 else "c") for index in range(15)]
    orders = []
    for ranks in (1, size):
        with open_engine(model_folder(), "none", ranks) as engine:
            jobs, begun = list[Job](), list[int]()
            while len(jobs) < len(asks) or engine.has_work:
                for priority, tenant in asks[len(jobs) : len(jobs) + 6]:
                    tokens = 4 + len(jobs) % 5
                    jobs.append(engine.submit([3 + len(jobs), 2], max_new_tokens=tokens, priority=priority, tenant=tenant))
                for _ in range(3):
                    begun += [event.job_id for event in engine.step() if event.tokens]
            numbers = {job.id: index for index, job in enumerate(jobs)}
            orders.append([numbers[job_id] for job_id in dict.fromkeys(begun)])
    assert orders[0] == orders[1] != sorted(orders[0])


def test_sums_are_added_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    """So the sums are equal on every rank and at every position of a batch."""
    size, groups = 4, dict[int, int]()
    row = torch.randn(size, 64, generator=torch.Generator().manual_seed(3))
    expected = ((row[0] + row[1]) + row[2]) + row[3]
    found = [row[rank].repeat(33, 1) for rank in range(size)]

    def run(rank: int) -> None:
        groups[rank] = register_group(process_group(str(tmp_path / "store"), rank, size, SECONDS), SECONDS)
        sum_over_ranks.out(found[rank], groups[rank])

    with ThreadPoolExecutor(size) as threads:
        list(threads.map(run, range(size)))
    assert not torch.equal(expected, (row[3] + row[2]) + (row[1] + row[0]))
    assert all(torch.equal(each, expected.expand(33, -1)) for each in found)


def test_ranks_exchange_values_and_a_failure_on_one_fails_an_attempt_on_all(tmp_path: Path) -> None:
    """Also if the other ranks exchange more values in the attempt."""
    size, found, kept = 3, dict[int, Any](), list[weakref.ref[Any]]()

    def run(rank: int) -> None:
        groups = [process_group(f"{tmp_path}/{name}", rank, size, SECONDS) for name in "abc"]
        kept.extend(map(weakref.ref, groups))
        ranks = Ranks(rank, groups, SECONDS)

        def attempt(share: Callable[[Any], list[Any]]) -> list[Any]:
            first = share("x" * rank)
            if rank == 1:
                raise RuntimeError("no memory")
            return [first, share(rank), share(rank)]

        def equal(share: Callable[[Any], list[Any]]) -> list[Any]:
            return share([rank, None])

        found[rank] = ranks.exchange({rank: "y" * 1000 * rank}), rank_sums._run_on_all(ranks, attempt), rank_sums._run_on_all(ranks, equal)

    with ThreadPoolExecutor(size) as threads:
        list(threads.map(run, range(size)))
    values = [{rank: "y" * 1000 * rank} for rank in range(size)]
    assert found == {rank: (values, (None, "rank 1: no memory"), ([[0, None], [1, None], [2, None]], "")) for rank in range(size)}
    gc.collect()
    assert len(kept) == 9 and not any(group() for group in kept)


def test_requests_are_published_before_their_grammars_are_compiled_and_not_as_failed_when_cancelled() -> None:
    found, job = list[StepDecision](), Job(1, (1,), Constraint.choice(["a"]), SamplingParams(), 8, 0, (), 0)
    ranks: Any = SimpleNamespace(writer=True, rank0_decides=True, publish=found.append)
    queue, queued = LockstepQueue(ranks, 9, None, None, None), QueuedRequest(job, ready=False)
    scheduler = LockstepScheduler(ranks, queue, None, Limits(1, 0, 64, 16, 4, 16, 16, 0), PrefixSharing())
    queue.unfinished[job.id] = queued
    queue.enqueue_again(queued)
    assert scheduler.runnable and not scheduler.begin_step() and not scheduler.runnable
    assert queue.cancel(job)
    queued.ready, queued.error = True, "cancelled"
    scheduler._publish([])  # of a step whose cancelled jobs were found before
    assert scheduler.begin_step() == [(job, None, FinishReason.CANCELLED)]
    assert [(len(each.submitted), each.cancelled, each.admissible) for each in found] == [(1, [], []), (0, [], []), (0, [1], [])]


def test_recorded_steps_have_a_group_of_their_own() -> None:
    groups, used = RankGroups(graph=3, eager=5), list[int]()
    buffers = StaticBuffers([BufferSpec("x", (4,), torch.float32)])

    def step(buffers: StaticBuffers) -> None:
        buffers.x.add_(1)
        used.append(groups.current)

    run_eager(step, buffers)
    capture(step, buffers, "tape").replay()
    used.append(groups.current)
    assert used == [5, 3, 3, 5], "the tape runs a step twice, to find tensors that it keeps"


@pytest.mark.parametrize("eager", [pytest.param(True, marks=slow), pytest.param(False, marks=soak)])
def test_messages_of_graphs_and_of_eager_work_use_different_groups(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank uses the same groups, or messages would have no receiver. Prompts are eager here."""
    used, real = set[Any](), parallel.gather

    def gather(group: Any, *others: Any) -> torch.Tensor:
        used.add(group)
        return real(group, *others)

    monkeypatch.setattr(parallel, "gather", gather)
    with open_engine(model_folder(), "none", 2, eager=eager) as engine:
        groups = ranks_of(engine).groups
        assert engine.generate([1, 2, 3], max_new_tokens=4).tokens
    graph, other = (each.group for each in groups.members)
    assert graph is not other and used == ({other} if eager else {graph, other})


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=slow)])
def test_a_killed_rank_ends_all_jobs(eager: bool) -> None:
    """In a step, and in the capture before the first one."""
    with open_engine(model_folder(), "none", 2, round_timeout_seconds=SECONDS, eager=eager) as engine:
        jobs = [engine.submit([1, 2, 3], max_new_tokens=60) for _ in range(2)]
        if eager:
            ranks_of(engine).processes[0].kill()
            ranks_of(engine).processes[0].wait()
        else:
            engine.step()
        lose(engine, jobs, signal.SIGKILL, 0)


@pytest.mark.parametrize("which", [pytest.param("others", marks=slow), pytest.param("first", marks=soak)])
def test_a_round_that_hangs_on_one_rank_ends_all_jobs_in_time(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of that rank keeps running, as with a device that hangs."""
    flag = tmp_path / "flag"
    parallel_program.RELEASED.clear()
    monkeypatch.setenv("HANG", f"{os.getpid()} {which} {flag}")
    processors = (LogitsProcessor("hang", parallel_program.hang),)
    sampling = SamplingParams(temperature=1.0, logits_processors={"hang": ()})
    with open_engine(model_folder(), "none", 2, round_timeout_seconds=SECONDS, eager=True, logits_processors=processors) as engine:
        jobs = [engine.submit([1, 2, 3], max_new_tokens=60, sampling=sampling) for _ in range(2)]
        while not all(job.tokens for job in jobs):
            engine.step()
        try:
            require_error_in_time(engine, jobs, flag.touch)
        finally:
            parallel_program.RELEASED.set()


@soak
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the server ends with that error
def test_a_server_with_a_rank_that_hangs_reports_it() -> None:
    flags = ["serve", str(model_folder()), *"--eager -k 0 --max-length 512 --tensor-parallel 2".split()]
    with engine_of([*flags, "--round-timeout-seconds", str(SECONDS)]) as engine:
        try:
            with running(engine, Bounds()) as server, server.client as client:
                stream = client.completions.create(model="toy", prompt=[1, 2, 3], max_tokens=400, stream=True, extra_body=ON)
                next(stream)
                (process,), since = ranks_of(engine).processes, time.monotonic()
                process.send_signal(signal.SIGSTOP)
                with pytest.raises(openai.APIError, match=r"another rank is lost|did not finish"):
                    list(stream)
                assert time.monotonic() - since < SECONDS + 2.5 and process.poll() is not None
                health = server.send(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", end=False)
                assert health.startswith(b"HTTP/1.1 503 ")
        finally:
            engine.close()


def lose(engine: Engine, jobs: list[Job], how: signal.Signals, rank: int) -> None:
    processes = ranks_of(engine).processes
    require_error_in_time(engine, jobs, lambda: processes[rank].send_signal(how))


def require_error_in_time(engine: Engine, jobs: list[Job], fail: Callable[[], object]) -> None:
    processes, since = ranks_of(engine).processes, time.monotonic()
    fail()
    with pytest.raises(RuntimeError):
        list(engine.stream())
    assert time.monotonic() - since < SECONDS + 2.5  # 2 s of these are for ending a stopped process
    assert all(job.finish_reason == FinishReason.ERROR and job.error for job in jobs)
    assert all(process.poll() is not None for process in processes)


@soak
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_lost_at_any_step_ends_all_jobs_in_time(size: int, how: signal.Signals) -> None:
    sampling = SamplingParams(temperature=1.0, ignore_eos=True)
    for seed in range(4):
        rng = random.Random(seed)
        with open_engine(model_folder(), "ngram", size, round_timeout_seconds=SECONDS) as engine:
            jobs = [engine.submit([1 + seed, 2, 3], max_new_tokens=60, sampling=sampling) for _ in range(2)]
            for _ in range(rng.randrange(8)):
                engine.step()
            lose(engine, jobs, how, rng.randrange(size - 1))


@soak
@pytest.mark.parametrize("delay", [0.05, 1.0, 2.0, 3.0, 4.0, 6.0])
def test_a_rank_killed_at_any_time_of_the_start_is_an_error(delay: float) -> None:
    """While it imports, loads, connects, compares weights, captures or decodes. No process is left."""

    def kill() -> None:
        while not (found := children()):
            time.sleep(0.01)
        time.sleep(delay)
        os.kill(found[-1], signal.SIGKILL)

    def work() -> None:
        with open_engine(model_folder(), "ngram", 4, round_timeout_seconds=SECONDS) as engine:
            opened.append(engine)
            engine.capture()
            while True:
                engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=40)

    opened, killing = list[Engine](), threading.Thread(target=kill)
    killing.start()
    with pytest.raises(RuntimeError) as caught:
        work()
    assert opened or isinstance(caught.value, RankError), "from the capture on it is the error of a step"
    killing.join()
    assert not children()


def children() -> list[int]:
    """The ranks that this process has started."""
    command = ["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if RANK_MODULE in line]


@soak
@pytest.mark.parametrize("delay", [0.0, 0.05, 0.3])
def test_no_rank_outlives_a_killed_first_rank(delay: float) -> None:
    with programs([model_folder()], "none", size=4) as (first,):
        assert first.stdout is not None and first.stdout.readline() == "step\n"
        found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(first.pid)], capture_output=True, text=True, check=True).stdout.split()
        assert len(found) == 3
        time.sleep(delay)
        first.kill()
        first.wait()
        end = time.monotonic() + SECONDS
        while any(Path(f"/proc/{pid}").exists() for pid in found):
            assert time.monotonic() < end
            time.sleep(0.05)


@soak
@pytest.mark.parametrize("ranks", [2, 4])
def test_cancellations_compiles_and_several_threads(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job that was not cancelled has the tokens of one process. Each rank delays its grammars by its own random times."""
    monkeypatch.setattr(RequestQueue, "prepare", RequestQueue.prepare)  # restored after the test

    async def decode_all(engine: Engine) -> list[list[int]]:
        rng = random.Random(7)
        async with AsyncEngine(engine) as serving:

            async def one(index: int) -> list[int]:
                await asyncio.sleep(rng.random() / 4)
                constraint = Constraint.regex(f"[a-f]{{{index + 1},{index + 30}}}") if index % 2 else None
                sampling = SamplingParams(temperature=0.9, seed=index)
                stream = await serving.submit([3 + index, 4], constraint=constraint, sampling=sampling, max_new_tokens=20)
                if index % 5 == 0:
                    engine.cancel(stream.job)
                async for _ in stream:
                    pass
                return [] if index % 5 == 0 else list(stream.job.tokens)

            return await asyncio.gather(*(one(index) for index in range(24)))

    def divided() -> Engine:
        config = EngineConfig(max_rows=4, max_length=64, num_speculative_tokens=3, draft_length=3, compile_isolation="none")
        loaded = load_part(model_folder(), "ngram", config, ranks, vocabulary=parallel_program.delay_compiles)
        return Engine(loaded.target, loaded.draft, vocabulary=loaded.vocabulary, config=loaded.config)

    found = []
    for opened in (functools.partial(open_engine, model_folder(), "ngram", 1), divided):
        with opened() as engine:
            engine.capture()
            found.append(asyncio.run(decode_all(engine)))
    assert found[0] == found[1] and sum(map(len, found[0])) > 100


@soak
def test_two_programs_of_torchrun_give_the_tokens_of_one_process() -> None:
    with programs([model_folder()] * 2, "ngram") as started:
        found = [result(process) for process in started]
    expected = json.loads(json.dumps(alone("ngram")["jobs"]))
    assert found[0]["jobs"] == found[1]["jobs"] == expected and not found[0]["error"]


@soak
@pytest.mark.parametrize(("lost", "how"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_lost_program_of_torchrun_ends_the_jobs_of_the_other(lost: int, how: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOST", f"{lost} {how.value}")
    with programs([model_folder()] * 2, "ngram", round_timeout_seconds=SECONDS) as started:
        found = result(started[1 - lost])
    assert "another rank is lost, or did not answer within 5 s" in found["error"], found
    assert all(reason == "error" for _, reason, _ in found["jobs"])


@soak
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_different_weights_on_one_rank_are_detected_at_load(tmp_path: Path, name: str) -> None:
    folder, other = model_folder(), Path(shutil.copytree(model_folder(), tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors[name][..., -1] += 0.125
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with programs([folder, other], "none") as started:
        errors = [process.communicate(timeout=60)[1] for process in started]
    assert all(f"{name}: rank" in error and "has other weights than rank 0" in error for error in errors), errors


@pytest.mark.parametrize(("size", "accepted"), [(3, "a divisor of it"), (0, "a whole number >= 1"), ("2", "a whole number >= 1")])
def test_invalid_numbers_of_ranks_are_refused(size: Any, accepted: str) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel: got {size!r}.*{accepted}"):
        Engine.from_pretrained(model_folder(), tensor_parallel=size)


def test_models_that_are_not_divided_are_refused() -> None:
    with pytest.raises(ValueError, match=r"draft: got .* with tensor_parallel=2, expected None, a folder or a name"):
        Engine.from_pretrained(model_folder(), lambda *_: [], tensor_parallel=2)
    with pytest.raises(ValueError, match="path: got a model that tensor_parallel=2 does not divide, expected a folder of safetensors"):
        Engine.from_pretrained(model_gguf(), tensor_parallel=2)


def unpicklable(logits: torch.Tensor, given: ProcessorInput) -> torch.Tensor:
    return logits


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"backend": "cuda"},
            "EngineConfig.backend: got 'cuda' with tensor_parallel=2, expected 'tape', or a GPU for each of 2 processes: there are 0 GPUs",
        ),
        ({"save_hidden_states": "states"}, "EngineConfig.save_hidden_states: got 'states' with tensor_parallel, expected None"),
        ({"max_loras": 1}, "EngineConfig.max_loras: got 1 with tensor_parallel, expected 0"),
        (
            {"rounds_per_launch": "until_event", "draft_length": 0},
            "EngineConfig.rounds_per_launch: got 'until_event' with tensor_parallel, expected 1",
        ),
        ({"preemption": True}, "EngineConfig.preemption: got True with tensor_parallel, expected False"),
        ({"page_allocation": "grow"}, "EngineConfig.page_allocation: got 'grow' with tensor_parallel, expected 'reserve'"),
        ({"grammar_lane": "device"}, "EngineConfig.grammar_lane: got 'device' with tensor_parallel, expected 'auto' or 'host'"),
        (
            {"logits_processors": (PROCESSORS[0], LogitsProcessor("local", lambda logits, given: logits))},
            r"EngineConfig.logits_processors\[1\].function: got <function .*> with tensor_parallel, expected .* that pickle copies",
        ),
        (
            {"logits_processors": (LogitsProcessor("main", unpicklable),)},
            r"EngineConfig.logits_processors\[0\].function: got .*pickle copies",
        ),
    ],
)
def test_settings_unsupported_by_ranks_are_refused(fields: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any process is started. In those processes, `__main__` is another module, so its functions are refused."""
    monkeypatch.setattr(unpicklable, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "unpicklable", unpicklable, raising=False)
    monkeypatch.setattr(Ranks, "start", None)
    with pytest.raises(ValueError, match=f"^{message}"):
        Engine.from_pretrained(model_folder(), config=EngineConfig(**fields), tensor_parallel=2)


@slow
def test_the_error_of_a_rank_is_printed_unless_the_caller_gets_the_same_one(capfd: pytest.CaptureFixture[str]) -> None:
    refused = EngineConfig(max_length=64, attention="flashinfer")
    with pytest.raises(ValueError, match=r"^EngineConfig\.attention: got 'flashinfer', expected an implementation that runs on cpu"):
        Engine.from_pretrained(model_folder(), "none", tensor_parallel=2, config=refused)
    assert "flashinfer" not in capfd.readouterr().err
    with pytest.raises(RankError, match="a rank ended before it had loaded its part of the model; its error is on stderr"):
        Ranks.start(2, SECONDS, "not the arguments of a rank")
    assert "line" in (error := capfd.readouterr().err) and error.count("TypeError") == 1
    with pytest.raises(RankError, match="a rank ended before it had loaded its part of the model; its error is on stderr"):
        Ranks.start(2, SECONDS, (2, "/no/model", "none", None, {}))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("ValueError: path: got '/no/model', expected a local folder"), "a refusal needs no traceback"


def test_recordings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "start", None)
    with pytest.raises(ValueError, match=r"^record: got .*run.jsonl.* with tensor_parallel=2, expected None"):
        Engine.from_pretrained(model_folder(), tensor_parallel=2, record=tmp_path / "run.jsonl")


@slow
def test_requests_with_embeddings_are_refused_and_others_continue() -> None:
    with open_engine(model_folder(), "none", 2) as engine:
        image = {0: torch.zeros(1, target_of(engine).embedding_size)}
        with pytest.raises(ValueError, match=r"^prompt_embeddings: got embeddings with tensor_parallel, expected None"):
            engine.submit([1, 2, 3], prompt_embeddings=image)
        assert engine.generate([4, 5], max_new_tokens=8).tokens


@soak
def test_different_requests_on_one_rank_end_all_jobs() -> None:
    with programs([model_folder()] * 2, "none", counts=(4, 3), round_timeout_seconds=20.0) as started:
        found = [result(process) for process in started]
    for each in found:
        assert "the requests or the results of earlier steps differ" in each["error"] and each["seconds"] < 20
        assert all(reason == "error" for _, reason, _ in each["jobs"])
