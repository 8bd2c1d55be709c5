"""`stepgraph demo`: a small real model with its draft on this machine: streamed answers, the origin of every token, and timings."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepgraph.runtime.commands import options as flags
from stepgraph.runtime.commands.terminal import (
    FAILED,
    add_json_flag,
    colour_enabled,
    describe,
    load_libraries,
    print_error,
    print_json,
    print_text,
    printable,
    shows_progress,
    waiting,
)
from stepgraph.runtime.demo.pair import DRAFTS
from stepgraph.sampling.fields import clip_repr

if TYPE_CHECKING:
    from stepgraph.runtime.demo.scenarios import Scenario
    from stepgraph.runtime.demo.variants import Case, Pair
    from stepgraph.runtime.request import Job, StepEvent
    from stepgraph.sampling.grammar.compile.compiler import CompiledConstraint

SUMMARY = "decode with a small real model and its draft, and show where the speed comes from"
PICTURE, TRACE = "timeline.png", "timeline.json"
TRACED_ROUNDS = 6
MIN_LENGTH = 512
COLOURS = {"draft": "\x1b[32m", "look_up": "\x1b[36m", "forced": "\x1b[35m", "target": "\x1b[1m"}
ORIGINS = {"draft": "from the draft", "look_up": "looked up in the text", "forced": "forced by the grammar", "target": "from the target"}
RESET = "\x1b[0m"


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Answer three prompts with SmolLM2-135M-Instruct and the draft that is part of stepgraph: extract a record, call a tool,\n"
        "answer a question. Plain and speculative decoding alternate, with and without grammars; then a few rounds are traced and\n"
        "written as a picture and as a file for ui.perfetto.dev. Exit code 1: an answer fails or breaks its schema.",
        [
            "stepgraph demo --toy",
            "stepgraph demo --toy -k 2 --json --no-timeline --prompt 'pick some' --schema"
            """ '{"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 3}'""",
        ],
    )
    add_flag = parser.add_argument
    add_flag("-k", "--drafts", type=int, default=DRAFTS, metavar="K", help="drafts per round, 1 to 8 (default: %(default)s)")
    add_flag("--prompt", metavar="TEXT", help="your own prompt instead of the three")
    add_flag("--schema", metavar="FILE|JSON", help="a JSON schema for the answer to --prompt")
    add_flag("--max-new-tokens", type=int, default=128, metavar="N", help="maximum length of an answer (default: %(default)s)")
    add_flag("--repeats", type=int, default=3, metavar="N", help="measured answers of each variant (default: %(default)s)")
    flags.add_threads_flag(parser)
    add_flag("--out", type=Path, default=Path("stepgraph-demo"), metavar="FOLDER", help="for picture and trace (default: %(default)s)")
    add_flag("--no-timeline", action="store_true", help="do not write a picture and a trace")
    add_flag("--toy", action="store_true", help="use the toy pair: nothing to install, texts without meaning")
    add_json_flag(parser)


def run(options: argparse.Namespace) -> int:
    check(options)
    load_libraries()
    from stepgraph.runtime.demo.scenarios import SCENARIOS, Scenario
    from stepgraph.runtime.demo.variants import open_pair, toy_pair

    scenarios = list(SCENARIOS)
    if options.prompt is not None:
        schema = None if options.schema is None else flags.read_schema("--schema", options.schema)
        scenarios = [Scenario("yours", options.prompt, schema=schema)]
    flags.set_threads(options)
    with waiting("opening the models ..."):
        pair = toy_pair() if options.toy else open_pair(options.drafts, shows_progress() and not options.json)
    flags.set_default_threads(options, pair.target)
    with Demonstration(pair, scenarios, options) as demonstration:
        document = demonstration.run()
    if options.json:
        print_json(document)
    failures = {name: answer["failed"] for name, answer in document["answers"].items() if answer["failed"]}
    for name, failure in failures.items():
        print_error(f"stepgraph demo: {name}: {failure}")
    return FAILED if failures else 0


def check(options: argparse.Namespace) -> None:
    if options.schema is not None and options.prompt is None:
        accepted = "both: the built-in prompts have schemas of their own"
        raise ValueError(f"--schema: got {clip_repr(options.schema)} without --prompt, expected {accepted}")
    for flag, least, most in (("drafts", 1, 8), ("max-new-tokens", 2, 4096), ("repeats", 1, 1000)):
        flags.check_range(options, flag, least, most)
    if not options.no_timeline:
        require_folder(options.out)  # before minutes of decoding


def require_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        accepted = "a writable folder, or --no-timeline"
        raise ValueError(f"--out: got {clip_repr(str(folder))} ({error.strerror}), expected {accepted}") from None


class Demonstration:
    """One engine per variant of the pair, and the scenarios that they answer."""

    def __init__(self, pair: Pair, scenarios: list[Scenario], options: argparse.Namespace) -> None:
        import torch

        self.threads = torch.get_num_threads()
        self.pair, self.scenarios, self.options = pair, scenarios, options
        self.prompts = {scenario.name: pair.codec.chat(scenario.messages) for scenario in scenarios}
        self.cases: list[Case] = []
        self.rates: dict[str, dict[str, float]] = {}  # tokens per second, by variant and scenario
        self._colour, self._progress = colour_enabled(sys.stdout) and not options.json, shows_progress() and not options.json

    def __enter__(self) -> Demonstration:
        return self

    def __exit__(self, *_: object) -> None:
        for case in self.cases:
            case.engine.close()

    def run(self) -> dict[str, Any]:
        self.prepare()
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        self._print(f"{self.pair.name}, {self.options.drafts} drafts per round, {threads}")
        if self._colour:
            print(", ".join(f"{COLOURS[origin]}{meaning}{RESET}" for origin, meaning in ORIGINS.items()))
        answers = {scenario.name: self.answer(scenario) for scenario in self.scenarios}
        with self._bar("race", self.options.repeats * sum(len(self._suitable(scenario)) for scenario in self.scenarios)) as bar:
            for scenario in self.scenarios:
                self.race(scenario, bar.update)
        self._print("\n" + "\n".join(table(self.cases, self.rates)))
        document: dict[str, Any] = {"pair": self.pair.name, "drafts": self.options.drafts, "threads": self.threads, "answers": answers}
        document["variants"] = [
            {**case.figures(), "tokens_per_second": self.rates[case.variant.name]} for case in self.cases if case.variant.name in self.rates
        ]
        if not self.options.no_timeline:
            document["timeline"] = self.timeline()
        return document

    def prepare(self) -> None:
        """Make the engines and compile the grammars, so that bad input raises before anything is printed."""
        from stepgraph.runtime.demo.variants import Case, variants

        length = max(MIN_LENGTH, *(len(prompt) + self.options.max_new_tokens for prompt in self.prompts.values()))
        all_variants = variants(self.options.drafts)
        with self._bar("prepare", len(all_variants) + len(self.scenarios)) as bar:
            for variant in all_variants:
                self.cases.append(Case(variant, self.pair, length))
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
        job = self._run(fastest, scenario, lambda event: self._show(event, stream.push))
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
        """Measure the variants, interleaved. The times of the first answers are discarded."""
        cases = self._suitable(scenario)
        for case in cases:
            case.tokens, case.seconds = 0, 0.0
        for _ in range(self.options.repeats):
            for case in cases:
                self._run(case, scenario)
                update()
        for case in cases:
            self.rates.setdefault(case.variant.name, {})[scenario.name] = round(case.tokens_per_second, 1)

    def timeline(self) -> dict[str, Any]:
        """Trace some rounds of the fastest variant on the first scenario."""
        scenario, trace_path, picture_path = self.scenarios[0], self.options.out / TRACE, self.options.out / PICTURE
        case = self._suitable(scenario)[-1]
        files = f"{picture_path}: the timeline; {trace_path}: the same for ui.perfetto.dev"
        picture: str | None = str(picture_path)
        with self._bar("timeline", 1):
            with case.engine.trace(rounds=TRACED_ROUNDS) as trace:
                self._run(case, scenario)
            timeline, summary = trace.timeline, trace.timeline.summary()
            timeline.save_perfetto(trace_path)
            try:
                timeline.save_picture(picture_path)
            except RuntimeError as error:  # matplotlib is optional
                picture, files = None, f"{trace_path}: the timeline, for ui.perfetto.dev; no picture: {error}"
        totals = "\n".join(str(summary).splitlines()[-2:])  # without the table, which the picture shows
        self._print(f"\n{totals}\n{files}")
        return {"trace": str(trace_path), "picture": picture, "summary": summary.as_dict()}

    def _bar(self, label: str, steps: int) -> Any:
        from tqdm import tqdm

        return tqdm(total=steps, desc=label, disable=not self._progress, leave=False)

    def _compiled(self, scenario: Scenario) -> CompiledConstraint | None:
        return self.cases[-1].engine.compile(scenario.constraint) if scenario.constraint else None

    def _suitable(self, scenario: Scenario) -> list[Case]:
        """The variants whose answers differ for this scenario: without a schema, those without grammars."""
        return [case for case in self.cases if scenario.schema is not None or not case.variant.constrained]

    def _run(self, case: Case, scenario: Scenario, show: Callable[[StepEvent], object] = lambda event: None) -> Job:
        return case.run(self.prompts[scenario.name], scenario.constraint, self.options.max_new_tokens, show)

    def _show(self, event: StepEvent, decode: Callable[[tuple[int]], str]) -> None:
        if self.options.json:
            return
        for token, origin in zip(event.tokens, event.origins, strict=True):
            text = printable(decode((token,)), sys.stdout)
            print(f"{COLOURS[origin.value]}{text}{RESET}" if self._colour else text, end="", flush=True)

    def _print(self, text: str) -> None:
        if not self.options.json:
            print_text(text)


def table(cases: list[Case], rates: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Lines with tokens per second by scenario, and counts over all scenarios."""
    scenarios = list(dict.fromkeys(name for row in rates.values() for name in row))
    counts = {"tokens_per_round": "per round", "mask_fills": "mask fills", "replays": "replays", "host_syncs": "syncs"}
    lines = [f"{'tokens per second':<24}" + "".join(f"{name:>12}" for name in (*scenarios, *counts.values()))]
    for case in cases:
        if case.variant.name not in rates:  # a variant with grammars, without a scenario that has one
            continue
        figures, row = case.figures(), rates[case.variant.name]
        cells = [f"{row[name]:.1f}" if name in row else "" for name in scenarios] + [str(figures[key]) for key in counts]
        lines.append(f"{case.variant.name:<24}" + "".join(f"{cell:>12}" for cell in cells))
    base, fast = "plain + grammar", "speculative + grammar"
    ratios = [f"{rates[fast][name] / rates[base][name]:.2f}" if name in rates.get(base, {}) else "" for name in scenarios]
    return [*lines, f"{'speed-up':<24}" + "".join(f"{ratio:>12}" for ratio in ratios)] if base in rates else lines


def failure_of(job: Job, compiled: CompiledConstraint | None) -> str:
    """Empty for an answer that a new matcher accepts, complete or cut short by its length."""
    if job.finish_reason in ("error", "dead_end"):
        return f"{job.finish_reason}: {job.error or 'no token is allowed'}"
    matcher = compiled.matcher() if compiled else None
    if matcher is not None and not all(matcher.accept_token(token) for token in job.tokens):
        return "the answer breaks its schema"
    return ""
