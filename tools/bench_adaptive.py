"""Benchmark of automatic draft lengths: plain decoding, every fixed length and "auto" in one engine, interleaved; one JSON document last.

    python tools/bench_adaptive.py                   the toy pair, two minutes
    python tools/bench_adaptive.py --demo            the demonstration's pair, on held-out prompts, in 12 minutes
    python tools/bench_adaptive.py --demo --only json "free text" --turns 2

Costs, also those that the choice uses, are processor times of the whole process, since other processes may share the machine. Rounds,
tokens per round and draft lengths are counts. Ratios are medians over turns; the first turn, in which "auto" learns, is listed apart.
All workloads run in each turn, most of them several times, short ones most often; turns from the third on begin only if
`--seconds` leaves time for them. Fixed lengths slower than nine tenths of the best one in each of the first three samples are left out of
the others. In the mixed batch each request that ends is replaced by one of its kind, whose prompt is measured too: both are in it until the
end.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

import torch
from torch import Tensor, nn
from tqdm import tqdm

from stepgraph import Constraint, Engine, EngineConfig, Job, SamplingParams
from stepgraph.graphs.graph_key import PLAIN, Drafting
from stepgraph.runtime.demo.variants import LOOK_UP, Pair, open_pair, toy_pair
from tools.origin import origin
from tools.train.demo.prompts import make_prompt
from tools.train.demo.schemas import MEASURED, SCHEMAS

AUTO = "auto"
MIN_TURNS = 2
ALL_TURNS = 3  # turns in which every fixed length runs
CONTENDER_SHARE = 0.9  # share of the best fixed length's rate: slower lengths do not run in later turns
GOALS_OVER_PLAIN = {"json": 2.3, "free text": 1.1}  # goals over plain decoding, for the demonstration's models
FIRST_SEED = 2000  # not used by other measurements
REFILL_TURNS = 10 * len(MEASURED)  # a multiple of the kinds, so that the requests of a row have one schema; more turns than are measured
PROSE = r"[A-Za-z ,.\n]{150,200}"
RECORD = r'\{"name": "[A-Za-z ]{3,16}", "age": [1-9][0-9], "city": "[A-Za-z ]{3,16}", "remote": (true|false)\}\n'
CODE = """def total_price(items, discount):
    total = 0
    for item in items:
        if item.quantity > 0:
            total = total + item.price * item.quantity
    if discount > 0:
        total = total - total * discount
    return total
"""


class Request(NamedTuple):
    prompt: tuple[int, ...]
    constraint: Constraint | None = None
    draft_ids: tuple[int, ...] | None = None


class Workload(NamedTuple):
    requests: Callable[[int], Sequence[Request]]  # the requests of a turn, submitted together
    new_tokens: int
    wrong_drafts: bool = False  # every draft of the draft model is wrong
    data: str = ""
    repeats: int = 1  # samples of each variant in a turn
    refilled: int = 0  # a turn ends after so many tokens, and requests that end before are replaced; 0: every turn decodes its requests


class WorstDraft(nn.Module):
    """A draft model that proposes its least likely token."""

    def __init__(self, draft: nn.Module) -> None:
        super().__init__()
        self.draft = draft

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "draft" else getattr(super().__getattr__("draft"), name)

    def forward(self, *inputs: Any) -> Any:
        return self.draft(*inputs)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.draft.logits(hidden)  # type: ignore[operator]
        return -logits


@dataclass
class Sample:
    """One turn of one variant."""

    tokens: int
    row_rounds: int  # rounds, counted once for each request
    rounds: dict[str, int]  # by Drafting
    seconds: float  # processor time

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Bench:
    """One engine; a variant is a fixed drafting of all its rounds, or AUTO."""

    def __init__(self, pair: Pair, drafts: int, rows: int, max_length: int, wrong_drafts: bool, look_up: int) -> None:
        config = EngineConfig(
            max_rows=rows,
            num_speculative_tokens=drafts,
            max_length=max_length,
            greedy_only=True,
            prefix_reuse=False,
            look_up=0 if wrong_drafts else look_up,
            forced_drafts=not wrong_drafts,
        )
        assert isinstance(pair.draft, nn.Module)
        self.engine = Engine(pair.target, WorstDraft(pair.draft) if wrong_drafts else pair.draft, vocabulary=pair.vocabulary, config=config)
        chooser = self.engine._parts.draft_lengths
        assert chooser is not None
        chooser.clock = time.process_time
        self.engine.capture()
        self.chooser = chooser

    @property
    def variants(self) -> tuple[Drafting | str, ...]:
        return (*self.chooser.choices, AUTO)

    def run(self, workload: Workload, turn: int, variant: Drafting | str) -> Sample:
        engine, before = self.engine, self._rounds()
        self.chooser.fixed_drafting = None if isinstance(variant, str) else variant
        requests = workload.requests(turn)
        for req in requests:
            if req.constraint is not None:
                engine.compile(req.constraint)  # not measured
        jobs = [self._submit(req, workload.new_tokens) for req in requests]
        while any(not job.tokens and not job.finished for job in jobs):  # prompts are not measured: they cost all variants the same
            engine.step()
        tokens, earlier, begin = sum(len(job.tokens) for job in jobs), sum(job.rounds for job in jobs), time.process_time()
        if workload.refilled:
            self._refill(workload, turn, jobs, tokens + workload.refilled)
        else:
            collections.deque(engine.stream(), maxlen=0)
        seconds, tokens = time.process_time() - begin, sum(len(job.tokens) for job in jobs) - tokens
        for job in jobs:
            engine.cancel(job)
        collections.deque(engine.stream(), maxlen=0)
        self.chooser.fixed_drafting = None
        wrong = [job.error for job in jobs if job.error]
        assert not wrong, wrong
        rounds = {length: count - before.get(length, 0) for length, count in self._rounds().items()}
        return Sample(
            tokens,
            sum(job.rounds for job in jobs) - earlier,
            {length: count for length, count in sorted(rounds.items()) if count},
            seconds,
        )

    def _submit(self, req: Request, new_tokens: int) -> Job:
        return self.engine.submit(
            req.prompt,
            constraint=req.constraint,
            draft_ids=req.draft_ids,
            max_new_tokens=new_tokens,
            sampling=SamplingParams(temperature=0, ignore_eos=req.constraint is None),
        )

    def _refill(self, workload: Workload, turn: int, jobs: list[Job], tokens: int) -> None:
        """Step until the jobs have so many tokens. A request that ends is replaced by that of its row in a later turn, which is of the same
        kind and is added to the jobs."""
        running, turns = list(jobs), [turn] * len(jobs)
        while sum(len(job.tokens) for job in jobs) < tokens:
            self.engine.step()
            for row, job in enumerate(running):
                if job.finished:
                    turns[row] += REFILL_TURNS
                    running[row] = self._submit(workload.requests(turns[row])[row], workload.new_tokens)
                    jobs.append(running[row])

    def _rounds(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for graph in self.engine.stats().graphs:
            found[str(graph.key.drafting)] = found.get(str(graph.key.drafting), 0) + graph.rounds
        return found


def figures(samples: Mapping[Drafting | str, Sequence[Sample]]) -> dict[str, Any]:
    """Per variant the counts and the rate relative to plain decoding in the same turn; "auto" also relative to the best fixed length."""
    found: dict[str, Any] = {}
    for variant, turns in samples.items():
        later = turns[1:] or turns
        rounds: dict[str, int] = {}
        for length, count in [pair for turn in later for pair in turn.rounds.items()]:
            rounds[length] = rounds.get(length, 0) + count
        found[str(variant)] = {
            "tokens_per_round": round(sum(turn.tokens for turn in turns) / max(1, sum(turn.row_rounds for turn in turns)), 3),
            "rounds": sum(rounds.values()),
            "rounds_by_drafts": dict(sorted(rounds.items())),
            "cpu_seconds": round(sum(turn.seconds for turn in later), 3),
            "over_plain": _ratio(turns, samples[PLAIN]),
            "over_plain_first_turn": round(turns[0].rate / samples[PLAIN][0].rate, 3),
        }
    best = max((variant for variant in samples if variant != AUTO), key=lambda variant: found[str(variant)]["over_plain"])
    return {"variants": found, "best_fixed": str(best), "auto_over_best_fixed": _over_best_fixed(samples)}


def _over_best_fixed(samples: Mapping[Drafting | str, Sequence[Sample]]) -> float:
    """The median over turns, without the first, of "auto" over the fixed choice that is best in the other turns. The best choice of the
    same turn would be selected by noise among about equal ones, so that an equally fast "auto" would seem slower."""
    fixed, later, ratios = contenders(samples), range(len(samples[AUTO]))[1:] or range(1), list[float]()
    for turn in later:
        others = [each for each in later if each != turn] or [0]
        best = max(fixed, key=lambda variant: _ratio(samples[variant], samples[PLAIN], others))
        ratios.append(samples[AUTO][turn].rate / samples[best][turn].rate)
    return round(statistics.median(ratios), 3)


def contenders(samples: Mapping[Drafting | str, Sequence[Sample]]) -> list[Drafting | str]:
    """The fixed choices that run in every turn: those within CONTENDER_SHARE of the best one in any of the first turns."""
    fixed, turns = [each for each in samples if each != AUTO], range(min(ALL_TURNS, len(samples[PLAIN])))
    least = [CONTENDER_SHARE * max(samples[each][turn].rate for each in fixed) for turn in turns]
    return [each for each in fixed if any(samples[each][turn].rate >= least[turn] for turn in turns)]


def _ratio(turns: Sequence[Sample], others: Sequence[Sample], measured: Sequence[int] = ()) -> float:
    """The median over the measured turns, by default all without the first."""
    return round(statistics.median(turns[each].rate / others[each].rate for each in measured or range(len(turns))[1:] or [0]), 3)


def toy_workloads(pair: Pair) -> dict[str, Workload]:
    record = Constraint.json_schema(SCHEMAS["person"])

    def req(turn: int, row: int, constraint: Constraint | None = None) -> Request:
        return Request((turn % 90 + 1, row + 1, 3), constraint)

    made: dict[str, Workload] = {
        "never right": Workload(lambda turn: [req(turn, 0)], 200, wrong_drafts=True),
        "json": Workload(lambda turn: [req(turn, 0, record)], 120),
        "switching": Workload(lambda turn: [req(turn, 0, Constraint.regex(f"({RECORD}{PROSE}){{2}}"))], 400),
        "mixed batch of 8": Workload(lambda turn: [req(turn, row, record if row < 4 else None) for row in range(8)], 100, refilled=1200),
    }
    for rows in (1, 4, 8):
        made[f"free text, batch of {rows}"] = Workload(lambda turn, rows=rows: [req(turn, row) for row in range(rows)], 150)  # type: ignore[misc]
    return made


def demo_workloads(pair: Pair) -> dict[str, Workload]:
    """Prompts of the held-out word lists: names, places, things and topics that the head was not trained on."""
    held_out = "held-out names, places and topics"

    def ids(*messages: Mapping[str, str]) -> tuple[int, ...]:
        return tuple(pair.codec.chat(messages))

    def request_of(kind: str, turn: int, row: int = 0) -> Request:
        made = make_prompt(FIRST_SEED + 100 * turn + row, kind, held_out=True)
        return Request(ids(*made.messages), Constraint.json_schema(made.schema) if made.schema else None)

    def record(turn: int, row: int = 0) -> Request:
        return request_of(MEASURED[(turn + row) % len(MEASURED)], turn, row)

    def edit(turn: int, row: int = 0) -> Request:
        name = ("amount", "sum_of_prices", "result", "cost")[turn % 4]
        request = f"Rewrite this function with the variable total renamed to {name}. Answer with the function only.\n\n{CODE}"
        return Request(ids({"role": "user", "content": request}), None, tuple(pair.codec.encode(CODE, begins=False)))

    def summary(turn: int, row: int = 0) -> Request:
        texts = [make_prompt(FIRST_SEED + 100 * turn + index, MEASURED[index], held_out=True).messages[0]["content"] for index in range(4)]
        notes = "\n\n".join(text.split("\n\n", 1)[1] for text in texts)
        return Request(ids({"role": "user", "content": f"Summarise these notes in detail, one after the other.\n\n{notes}"}))

    def switching(turn: int, row: int = 0) -> Request:
        request = make_prompt(FIRST_SEED + turn, "person", held_out=True).messages[0]["content"]
        return Request(ids({"role": "user", "content": request}), Constraint.regex(f"({RECORD}{PROSE}){{2}}"))

    def batch(one: Callable[[int, int], Request], rows: int) -> Callable[[int], Sequence[Request]]:
        return lambda turn: [one(turn, row) for row in range(rows)]

    def talk(turn: int, row: int = 0) -> Request:
        return request_of("talk", turn, row)

    # Samples of the same rounds differ by 4%, short ones by more: so more of them are taken in a turn, and where the goal is 0.98
    made = {
        "never right": Workload(batch(talk, 1), 150, wrong_drafts=True, repeats=4, data=f"talk, {held_out}"),
        "json": Workload(batch(record, 1), 120, repeats=4, data=f"five schemas, {held_out}"),
        "tool calls": Workload(batch(lambda turn, row: request_of("tool call", turn, row), 1), 80, repeats=6, data=held_out),
        "free text": Workload(batch(talk, 1), 150, repeats=3, data=held_out),
        "code editing": Workload(batch(edit, 1), 120, repeats=3, data="one function of 9 lines, given as draft_ids; four new names"),
        "long summaries": Workload(batch(summary, 1), 250, repeats=2, data=f"four notes, {held_out}"),
        "switching": Workload(batch(switching, 1), 300, repeats=2, data=f"two records and two texts by a regular expression, {held_out}"),
    }
    for rows in (4, 8):
        made[f"json, batch of {rows}"] = Workload(batch(record, rows), 60, repeats=4, data=held_out)
        made[f"free text, batch of {rows}"] = Workload(batch(talk, rows), 60, repeats=3, data=held_out)
    mixed = lambda turn: [*batch(record, 4)(turn), *batch(talk, 4)(turn)]  # noqa: E731
    made["mixed batch of 8"] = Workload(mixed, 60, repeats=2, data=held_out, refilled=800)
    return made


def goals(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Goals and measured ratios of "auto" over plain decoding and over the best fixed choice."""
    rows = list[dict[str, Any]]()
    for name, row in found.items():
        over_plain, over_best = row["variants"][AUTO]["over_plain"], row["auto_over_best_fixed"]
        if row["wrong"]:
            goal = [("over plain", over_plain, 0.98)]
        else:
            goal = [("over the best fixed", over_best, 0.93 if name == "switching" else 0.95)]
            goal += [("over plain", over_plain, GOALS_OVER_PLAIN[name])] if name in GOALS_OVER_PLAIN and row["data"] != "toy" else []
        rows += [
            {"workload": name, "figure": figure, "value": value, "goal": least, "met": value >= least} for figure, value, least in goal
        ]
    return rows


def report(demo: bool, drafts: int, turns: int, only: Sequence[str], seconds: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    show = sys.stderr.isatty()
    pair = open_pair(drafts, show) if demo else toy_pair()
    workloads = (demo_workloads if demo else toy_workloads)(pair)
    if unknown := [name for name in only if name not in workloads]:
        raise ValueError(f"--only: got {unknown[0]!r}, expected some of {', '.join(map(repr, workloads))}")
    benches: dict[tuple[int, bool], Bench] = {}
    chosen = {name: workload for name, workload in workloads.items() if not only or name in only}
    samples: dict[str, dict[Drafting | str, list[Sample]]] = {name: {} for name in chosen}
    begin, done = time.monotonic(), 0
    with tqdm(total=len(chosen) * turns, unit="turn", disable=not show) as bar:
        while done < turns and (done < MIN_TURNS or (time.monotonic() - begin) * (done + 1) / done < seconds):
            for name, workload in chosen.items():
                bar.set_description(name)
                key = len(workload.requests(0)), workload.wrong_drafts
                if key not in benches:
                    benches[key] = Bench(pair, drafts, key[0], 768 if demo else 512, key[1], LOOK_UP)
                bench = benches[key]
                for turn in range(done * workload.repeats, (done + 1) * workload.repeats):
                    variants = bench.variants
                    if turn >= ALL_TURNS:
                        variants = tuple(variant for variant in variants if variant in {*contenders(samples[name]), PLAIN, AUTO})
                    for offset in range(len(variants)):  # each turn begins with another variant
                        variant = variants[(turn + offset) % len(variants)]
                        samples[name].setdefault(variant, []).append(bench.run(workload, turn, variant))
                bar.update()
            done += 1
    found: dict[str, Any] = {}
    for name, workload in chosen.items():
        rows, data = len(workload.requests(0)), workload.data or "toy"
        found[name] = {"rows": rows, "wrong": workload.wrong_drafts, "data": data, **figures(samples[name])}
        print(line(name, found[name]))
    for bench in benches.values():
        bench.engine.close()
    return {
        **origin(),
        "models": pair.name,
        "drafts": drafts,
        "turns": done,
        "seconds": round(time.monotonic() - begin),
        "goals": goals(found),
        "workloads": found,
    }


def line(name: str, row: Mapping[str, Any]) -> str:
    parts = [f"{variant}: {each['over_plain']:.2f} ({each['tokens_per_round']:.2f})" for variant, each in row["variants"].items()]
    return f"{name:<24}auto / best {row['auto_over_best_fixed']:.3f}   over plain (tokens per round): {'  '.join(parts)}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--demo", action="store_true", help="the demonstration's models, instead of the toy pair")
    add("-k", "--drafts", type=int, default=7, help="num_speculative_tokens (default: %(default)s)")
    add("--turns", type=int, default=4, metavar="N", help="turns of each workload (default: %(default)s)")
    add("--only", nargs="+", default=[], metavar="NAME", help="run only these workloads")
    add("--seconds", type=float, default=480, metavar="S", help="time for turns after the second (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        found = report(options.demo, options.drafts, options.turns, options.only, options.seconds)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"bench_adaptive: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
