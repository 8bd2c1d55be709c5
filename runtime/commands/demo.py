"""`stepgraph demo`: a small real model with its draft on this machine: streamed answers, the origin of every token, and timings."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from stepgraph.runtime.commands import demo_report, engines, terminal
from stepgraph.runtime.demo.scenarios import SCENARIOS, Scenario
from stepgraph.runtime.demo.variants import Case, Pair, open_pair, tokens_per_second, toy_pair, variants
from stepgraph.runtime.request import Job, StepEvent
from stepgraph.runtime.trace import Timeline
from stepgraph.sampling.grammar.compile.compiler import CompiledConstraint
from stepgraph.sampling.grammar.compile.coverage import check_constraints

TRACE = "timeline.json"
TRACED_ROUNDS = 6
MIN_LENGTH = 512


def run(options: argparse.Namespace) -> int:
    scenarios = list(SCENARIOS)
    if options.prompt is not None:
        scenarios = [Scenario("yours", options.prompt, schema=options.schema)]
        check_constraints(filter(None, [scenarios[0].constraint]))
    engines.set_threads(options)
    with terminal.waiting("opening the models ..."):
        pair = toy_pair() if options.toy else open_pair(options.drafts, terminal.shows_progress() and not options.json)
    document = Demonstration(pair, scenarios, options).run()
    if options.json:
        terminal.print_json(document)
    failures = {name: answer["failed"] for name, answer in document["answers"].items()}
    return terminal.report_failures("demo", [f"{name}: {failure}" for name, failure in failures.items() if failure])


class Demonstration:
    """One engine per variant of the pair, and the scenarios that they answer."""

    def __init__(self, pair: Pair, scenarios: list[Scenario], options: argparse.Namespace) -> None:
        self.threads = torch.get_num_threads()
        self.pair, self.scenarios, self.options = pair, scenarios, options
        self.prompts = {scenario.name: pair.codec.chat(scenario.messages) for scenario in scenarios}
        self.cases: list[Case] = []
        self.pieces: dict[str, list[tuple[str, str]]] = {}  # of the answers by scenario: texts of tokens, and their origins
        self.traced: Timeline | None = None
        self.rates: dict[str, dict[str, float]] = {}  # tokens per second, by variant and scenario
        self._colour = terminal.colour_enabled(sys.stdout) and not options.json
        self._progress = terminal.shows_progress() and not options.json

    def run(self) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            self.prepare(stack)
            return self.decode()

    def decode(self) -> dict[str, Any]:
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        self._print(f"{self.pair.name}, at most {self.options.drafts} drafts per round, {threads}")
        if self._colour:
            print(", ".join(terminal.coloured(meaning, origin) for origin, meaning in terminal.ORIGINS.items()))
        answers = {scenario.name: self.answer(scenario) for scenario in self.scenarios}
        with self._bar("race", self.options.repeats * sum(len(self._suitable(scenario)) for scenario in self.scenarios)) as bar:
            for scenario in self.scenarios:
                self.race(scenario, bar.update)
        head, rows = table(self.cases, self.rates)
        self._print("\n" + "\n".join(terminal.table(head, rows)))
        document: dict[str, Any] = {"pair": self.pair.name, "drafts": self.options.drafts, "threads": self.threads, "answers": answers}
        document["variants"] = [
            {**case.figures(), "tokens_per_second": self.rates[case.variant.name]} for case in self.cases if case.variant.name in self.rates
        ]
        if not self.options.no_timeline:
            document["timeline"] = self.timeline()
        if self.options.html:
            shown = [demo_report.Answer(each.name, each.user, self.pieces[each.name]) for each in self.scenarios]
            Path(self.options.html).write_text(demo_report.page(self.pair.name, shown, head, rows, self.traced), encoding="utf-8")
            self._print(f"{self.options.html}: answers, table and timeline as a page")
        return document

    def prepare(self, stack: contextlib.ExitStack) -> None:
        """Make the engines and compile the grammars, so that bad input raises before anything is printed."""
        length = max(MIN_LENGTH, *(len(prompt) + self.options.max_new_tokens for prompt in self.prompts.values()))
        # Drafts of the toy pair take as long as its target: with "auto" it would not show any.
        all_variants = variants(self.options.drafts, draft_length=self.options.drafts if self.options.toy else "auto")
        with self._bar("prepare", len(all_variants) + len(self.scenarios)) as bar:
            for variant in all_variants:
                self.cases.append(Case(variant, self.pair, length))
                stack.enter_context(self.cases[-1].engine)
                bar.update()
            for scenario in self.scenarios:
                self._compiled(scenario)
                bar.update()
        for case in self.cases:
            case.engine.capture(progress=self._progress)

    def answer(self, scenario: Scenario) -> dict[str, Any]:
        """One answer of every variant; the fastest variant's is printed while it is generated."""
        self._print(f"\n{scenario.name}: {scenario.user}\n")
        *others, fastest = self._suitable(scenario)
        stream = self.pair.codec.stream()
        pieces = self.pieces[scenario.name] = []
        job = self._run(fastest, scenario, lambda event: self._show(event, stream.push, pieces))
        self._print(stream.finish())
        tokens: dict[str, list[int]] = {}
        with self._bar("the other variants", len(others)) as bar:
            for case in others:
                tokens[case.variant.name] = self._run(case, scenario).tokens
                bar.update()
        return {
            "text": self.pair.codec.decode(job.tokens),
            "finish_reason": str(job.finish_reason),
            "failed": failure_of(job, self._compiled(scenario)),
            "same_tokens": {name: other == job.tokens for name, other in tokens.items()},
        }

    def race(self, scenario: Scenario, update: Callable[[], object]) -> None:
        """Measure the variants, interleaved, without their first answers."""
        cases = self._suitable(scenario)
        for _ in range(self.options.repeats):
            for case in cases:
                self._run(case, scenario)
                update()
        for case in cases:
            rate = tokens_per_second(case.times[-self.options.repeats :])
            self.rates.setdefault(case.variant.name, {})[scenario.name] = round(rate, 1)

    def timeline(self) -> dict[str, Any]:
        """Trace some rounds of the fastest variant on the first scenario."""
        scenario, path = self.scenarios[0], self.options.out / TRACE
        case = self._suitable(scenario)[-1]
        with self._bar("timeline", 1):
            with case.engine.trace(rounds=TRACED_ROUNDS) as trace:
                self._run(case, scenario)
            trace.timeline.save_perfetto(path)
        self.traced, summary = trace.timeline, trace.timeline.summary()
        self._print(f"\n{summary}\n{path}: the timeline, for ui.perfetto.dev")
        return {"trace": str(path), "summary": summary.as_dict()}

    def _bar(self, label: str, steps: int) -> Any:
        return tqdm(total=steps, desc=label, disable=not self._progress, leave=False)

    def _compiled(self, scenario: Scenario) -> CompiledConstraint | None:
        return self.cases[-1].engine.compile(scenario.constraint) if scenario.constraint else None

    def _suitable(self, scenario: Scenario) -> list[Case]:
        """The variants whose answers differ for this scenario: without a schema, those without grammars."""
        return [case for case in self.cases if scenario.schema is not None or not case.variant.constrained]

    def _run(self, case: Case, scenario: Scenario, show: Callable[[StepEvent], object] = lambda event: None) -> Job:
        return case.run(self.prompts[scenario.name], scenario.constraint, self.options.max_new_tokens, show)

    def _show(self, event: StepEvent, decode: Callable[[tuple[int]], str], pieces: list[tuple[str, str]]) -> None:
        for token, origin in zip(event.tokens, event.origins, strict=True):
            pieces.append((decode((token,)), origin.value))
            if not self.options.json:
                terminal.print_text(pieces[-1][0], end="", origin=origin.value if self._colour else "")

    def _print(self, text: str) -> None:
        if not self.options.json:
            terminal.print_text(text)


def table(cases: list[Case], rates: Mapping[str, Mapping[str, float]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: tokens per second by scenario, and counts over all scenarios."""
    scenarios = list(dict.fromkeys(name for row in rates.values() for name in row))
    counts = {"per round": "tokens_per_round", "host masks": "mask_fills", "replays": "replays", "syncs": "host_syncs"}
    rows = []
    for case in cases:
        if row := rates.get(case.variant.name):  # none for a variant with grammars, without a scenario that has one
            figures = case.figures()
            cells = [row.get(name, "") for name in scenarios] + [figures[key] for key in counts.values()]
            rows.append([case.variant.name, *map(str, cells)])
    base, fast = rates.get("plain + grammar"), rates.get("speculative + grammar")
    if base and fast:
        ratios = [f"{fast[name] / base[name]:.2f}" if name in base else "" for name in scenarios]
        rows.append(["speed-up", *ratios, *[""] * len(counts)])
    return ["tokens per second", *scenarios, *counts], rows


def failure_of(job: Job, compiled: CompiledConstraint | None) -> str:
    """Empty for an answer that a new matcher accepts, complete or cut short by its length."""
    if failure := engines.failure_of(job):
        return failure
    matcher = compiled.matcher() if compiled else None
    if matcher is not None and not all(matcher.accept_token(token) for token in job.tokens):
        return "the answer breaks its schema"
    return ""
