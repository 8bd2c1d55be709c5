"""`stepgraph demo`: a small real model with its draft on this machine: streamed answers, the origin of every token, and timings."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2
import torch
from tqdm import tqdm

from stepgraph.graphs.spans import Span
from stepgraph.runtime.commands import engines, terminal
from stepgraph.runtime.commands.flags import TRACE_FILE
from stepgraph.runtime.commands.inputs import writing
from stepgraph.runtime.commands.terminal import ORIGINS
from stepgraph.runtime.demo.variants import SCENARIOS, Case, Pair, Scenario, open_pair, tokens_per_second, toy_pair, variants
from stepgraph.runtime.request import Job, StepEvent
from stepgraph.runtime.trace import StageTime, Timeline
from stepgraph.sampling.grammar.compile.compiler import CompiledConstraint

TRACED_ROUNDS = 6
MIN_LENGTH = 512
WIDTH = 2400  # of the timeline in pixels; it can be scrolled
ROW = 26  # height in pixels
STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --back: #ffffff; --line: #d0d7de; --soft: #57606a; --draft: #c6efd0; --look_up: #b8e3f5;
  --forced: #e7d4fa; --target: #ffe3b3; --stage: #4c8dd6; --host: #b45fc9; --wait: #c9ced4; --launch: #d98b3a }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --back: #0d1117; --line: #30363d; --soft: #9aa4af; --draft: #17502a;
  --look_up: #0f4a63; --forced: #4a2a6b; --target: #5f4410; --stage: #3f7fc4; --host: #a04fb5; --wait: #3a4149; --launch: #b8702a } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 64rem;
  margin: 2rem auto; padding: 0 1rem }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: 6px; padding: .8rem }
.prompt { color: var(--soft) } .scroll { overflow-x: auto } table { border-collapse: collapse }
th, td { padding: .25rem .8rem; border-bottom: 1px solid var(--line); text-align: right }
th:first-child, td:first-child { text-align: left }
mark { color: inherit; border-radius: 3px } svg text { fill: var(--text); font: 12px system-ui, sans-serif }
"""
STYLE += "".join(f".{origin} {{ background: var(--{origin}) }} " for origin in ORIGINS)
STYLE += "".join(f"rect.{kind} {{ fill: var(--{kind}); background: none }} " for kind in ("stage", "host", "wait", "launch"))
PAGE = """\
{% macro table(head, rows) %}<div class="scroll"><table><tr>{% for name in head %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>{% endmacro -%}
<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>stepgraph: {{ title }}</title><style>{{ style }}</style></head><body>
<h1>stepgraph: {{ title }}</h1>
<p>Origin of each token: {% for origin, meaning in origins.items() %}<mark class="{{ origin }}">{{ meaning }}</mark> {% endfor %}</p>
{% for scenario, pieces in answers %}
<h2>{{ scenario.name }}</h2><pre class="prompt">{{ scenario.user }}</pre>
<pre>{% for text, origin in pieces %}<mark class="{{ origin }}" title="{{ origins[origin] }}">{{ text }}</mark>{% endfor %}</pre>
{% endfor %}
<h2>Variants</h2>{{ table(head, rows) }}
{% if timeline %}
<h2>Timeline</h2>
<p>{{ summary.rounds }} rounds, median {{ "%.2f" % (summary.round_ns / 1e6) }} ms. The pointer on a bar shows its name and time.</p>
<div class="scroll">
<svg width="{{ width }}" height="{{ 2 * row * timeline.streams|length }}" role="img" aria-label="timeline of {{ summary.rounds }} rounds">
{% for stream in timeline.streams %}
{% set top = 2 * row * loop.index0 %}<text x="0" y="{{ top + 16 }}">{{ stream }}</text>
{% for span in timeline.spans if span.stream == stream %}
{% set time = span.end_ns - span.start_ns %}<rect class="{{ span.kind }}" x="{{ "%.2f" % ((span.start_ns - begin) * pixels_per_ns) }}"
 y="{{ top + row - 4 }}" width="{{ "%.2f" % ([time * pixels_per_ns, 0.5]|max) }}" height="{{ row - 6 }}">
<title>{{ label(span) }}, {{ "%.3f" % (time / 1e6) }} ms</title></rect>
{% endfor %}
{% endfor %}
</svg></div>{{ table(("stage", "count", "median ms"), stages) }}
{% endif %}
</body></html>
"""
Answer = tuple[Scenario, Sequence[tuple[str, str]]]  # with text and origin of every token


def run(options: argparse.Namespace) -> int:
    engines.set_threads(options)
    with terminal.waiting("opening the models ..."):
        pair = toy_pair() if options.toy else open_pair(options.drafts, terminal.shows_progress() and not options.json)
    with contextlib.redirect_stdout(io.StringIO()) if options.json else contextlib.nullcontext():
        document = Demonstration(pair, options).run()
    if options.json:
        terminal.print_json(document)
    failures = {name: answer["failed"] for name, answer in document["answers"].items()}
    return terminal.report_failures("demo", [f"{name}: {failure}" for name, failure in failures.items() if failure])


class Demonstration:
    """One engine per variant of the pair, and the scenarios that they answer."""

    def __init__(self, pair: Pair, options: argparse.Namespace) -> None:
        self.threads = torch.get_num_threads()
        self.pair, self.options = pair, options
        self.prompts = {scenario.name: pair.codec.chat(scenario.messages) for scenario in SCENARIOS}
        self.cases: list[Case] = []
        self.pieces: dict[str, list[tuple[str, str]]] = {}  # by scenario: text and origin of each token of the answer
        self.traced_timeline: Timeline | None = None
        self.rates: dict[str, dict[str, float]] = {}  # tokens per second, by variant and scenario
        self._progress = terminal.shows_progress() and not options.json

    def run(self) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            self.prepare(stack)
            return self.decode()

    def decode(self) -> dict[str, Any]:
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        terminal.print_text(f"{self.pair.name}, at most {self.options.drafts} drafts per round, {threads}")
        if terminal.colour_enabled(sys.stdout):
            print(", ".join(terminal.coloured(meaning, origin) for origin, meaning in ORIGINS.items()))
        answers = {scenario.name: self.answer(scenario) for scenario in SCENARIOS}
        with self._progress_bar("race", self.options.repeats * sum(len(self._cases_for(scenario)) for scenario in SCENARIOS)) as bar:
            for scenario in SCENARIOS:
                self.race(scenario, bar.update)
        head, rows = table(self.cases, self.rates)
        terminal.print_text("\n" + "\n".join(terminal.table(head, rows)))
        document: dict[str, Any] = {"pair": self.pair.name, "drafts": self.options.drafts, "threads": self.threads, "answers": answers}
        document["variants"] = [{**case.figures(), "tokens_per_second": self.rates[case.variant.name]} for case in self.cases]
        if not self.options.no_timeline:
            document["timeline"] = self.timeline()
        if self.options.html:
            shown = [(each, self.pieces[each.name]) for each in SCENARIOS]
            text = page(self.pair.name, shown, head, rows, self.traced_timeline)
            with writing("--html", self.options.html):
                self.options.html.write_text(text, encoding="utf-8")
            terminal.print_text(f"{self.options.html}: answers, table and timeline as a page")
        return document

    def prepare(self, stack: contextlib.ExitStack) -> None:
        """Make the engines and compile the grammars."""
        length = max(MIN_LENGTH, *(len(prompt) + self.options.max_new_tokens for prompt in self.prompts.values()))
        # A draft of the toy pair takes as long as the target: with "auto" no round would have drafts.
        all_variants = variants(self.options.drafts, draft_length=self.options.drafts if self.options.toy else "auto")
        with self._progress_bar("prepare", len(all_variants) + len(SCENARIOS)) as bar:
            for variant in all_variants:
                self.cases.append(Case(variant, self.pair, length))
                stack.enter_context(self.cases[-1].engine)
                bar.update()
            for scenario in SCENARIOS:
                self._compiled(scenario)
                bar.update()
        for case in self.cases:
            case.engine.capture(progress=self._progress)

    def answer(self, scenario: Scenario) -> dict[str, Any]:
        """One answer of every variant; the fastest variant's is printed while it is generated."""
        terminal.print_text(f"\n{scenario.name}: {scenario.user}\n")
        *others, fastest = self._cases_for(scenario)
        stream = self.pair.codec.stream()
        pieces = self.pieces[scenario.name] = []
        job = self._run(fastest, scenario, lambda event: self._show(event, stream.push, pieces))
        terminal.print_text(stream.finish())
        tokens: dict[str, list[int]] = {}
        with self._progress_bar("the other variants", len(others)) as bar:
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
        """Measure the variants, interleaved. The answers before are not counted."""
        cases = self._cases_for(scenario)
        for _ in range(self.options.repeats):
            for case in cases:
                self._run(case, scenario)
                update()
        for case in cases:
            rate = tokens_per_second(case.times[-self.options.repeats :])
            self.rates.setdefault(case.variant.name, {})[scenario.name] = round(rate, 1)

    def timeline(self) -> dict[str, Any]:
        """Trace some rounds of the fastest variant on the first scenario."""
        scenario, path = SCENARIOS[0], self.options.out / TRACE_FILE
        case = self._cases_for(scenario)[-1]
        with self._progress_bar("timeline", 1):
            with case.engine.trace(rounds=TRACED_ROUNDS) as trace:
                self._run(case, scenario)
            with writing("--out", path):
                trace.timeline.save_perfetto(path)
        self.traced_timeline, summary = trace.timeline, trace.timeline.summary()
        terminal.print_text(f"\n{summary}\n{path}: the timeline, for ui.perfetto.dev")
        return {"trace": str(path), "summary": summary.as_dict()}

    def _progress_bar(self, label: str, steps: int) -> Any:
        return tqdm(total=steps, desc=label, disable=not self._progress, leave=False)

    def _compiled(self, scenario: Scenario) -> CompiledConstraint | None:
        return self.cases[-1].engine.compile(scenario.constraint) if scenario.constraint else None

    def _cases_for(self, scenario: Scenario) -> list[Case]:
        """The variants to run for this scenario: without a schema, only the variants without grammars."""
        return [case for case in self.cases if scenario.schema is not None or not case.variant.constrained]

    def _run(self, case: Case, scenario: Scenario, show: Callable[[StepEvent], object] = lambda event: None) -> Job:
        return case.run(self.prompts[scenario.name], scenario.constraint, self.options.max_new_tokens, show)

    def _show(self, event: StepEvent, decode: Callable[[tuple[int]], str], pieces: list[tuple[str, str]]) -> None:
        for token, origin in zip(event.tokens, event.origins, strict=True):
            pieces.append((decode((token,)), origin.value))
            terminal.print_text(pieces[-1][0], end="", origin=origin.value)


def table(cases: list[Case], rates: Mapping[str, Mapping[str, float]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: tokens per second by scenario, and counts over all scenarios."""
    scenarios = list(dict.fromkeys(name for row in rates.values() for name in row))
    counts = {"per round": "tokens_per_round", "host masks": "mask_fills", "replays": "replays", "syncs": "host_syncs"}
    rows = []
    for case in cases:
        row, figures = rates[case.variant.name], case.figures()
        cells = [row.get(name, "") for name in scenarios] + [figures[key] for key in counts.values()]
        rows.append([case.variant.name, *map(str, cells)])
    base, fast = rates["plain + grammar"], rates["speculative + grammar"]
    ratios = [f"{fast[name] / base[name]:.2f}" if base.get(name) else "" for name in scenarios]
    rows.append(["speed-up", *ratios, *[""] * len(counts)])
    return ["tokens per second", *scenarios, *counts], rows


def failure_of(job: Job, compiled: CompiledConstraint | None) -> str:
    """Why the answer failed; empty if a new matcher accepts it, complete or cut short by its length."""
    if failure := engines.failure_of(job):
        return failure
    matcher = compiled.matcher() if compiled else None
    if matcher is not None and not all(matcher.accept_token(token) for token in job.tokens):
        return "the answer breaks its schema"
    return ""


def page(title: str, answers: Iterable[Answer], head: Sequence[str], rows: Iterable[Sequence[str]], timeline: Timeline | None) -> str:
    values: dict[str, Any] = {"title": title, "answers": answers, "head": head, "rows": rows, "timeline": timeline}
    if timeline is not None:
        begin, end = min((span.start_ns for span in timeline.spans), default=0), max((span.end_ns for span in timeline.spans), default=1)
        summary = timeline.summary()
        stages = [(_span_label(stage), stage.count, f"{stage.median_ns / 1e6:.3f}") for stage in summary.stages]
        values |= {"begin": begin, "pixels_per_ns": WIDTH / (end - begin), "summary": summary, "stages": stages}
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(PAGE)
    return page.render(values, style=STYLE, origins=ORIGINS, width=WIDTH, row=ROW, label=_span_label)


def _span_label(work: Span | StageTime) -> str:
    return f"{work.stream}: {'wait for ' if work.kind == 'wait' else ''}{work.name}"
