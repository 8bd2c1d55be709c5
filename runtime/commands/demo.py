"""`stepgraph demo`: a small real model and its draft on this machine. Answers as they come, where each token came from, why it is fast."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepgraph.runtime.commands.inputs import THREADS, read_schema, set_threads, settle_threads
from stepgraph.runtime.commands.terminal import FAILED, describe, load_libraries, print_json, shows_progress, waiting, wants_colour
from stepgraph.runtime.demo.pair import DRAFTS
from stepgraph.sampling.fields import clip_repr

if TYPE_CHECKING:
    from stepgraph.runtime.demo.scenarios import Scenario
    from stepgraph.runtime.demo.variants import Case, Pair
    from stepgraph.runtime.request import Job, StepEvent
    from stepgraph.sampling.grammar.compile.compiler import CompiledConstraint

SUMMARY = "decode with a small real model and its draft, and show why it is fast"
PICTURE, TRACE = "timeline.png", "timeline.json"
TRACED_ROUNDS = 6
LEAST_LENGTH = 512
COLOURS = {"draft": "\x1b[32m", "look_up": "\x1b[36m", "forced": "\x1b[35m", "target": "\x1b[1m"}
MEANINGS = {"draft": "the draft's", "look_up": "looked up in the text", "forced": "forced by the grammar", "target": "the target's own"}
RESET = "\x1b[0m"


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Answer three prompts with SmolLM2-135M-Instruct and the draft that comes with stepgraph: a record to extract, a tool to\n"
        "call, a question. Plain and speculative decoding take turns, with and without grammars; then a few rounds are traced, as a\n"
        "picture and as a file for ui.perfetto.dev. Exit code 1 where an answer fails or breaks its schema.",
        [
            "stepgraph demo --toy",
            "stepgraph demo --toy -k 2 --json --no-timeline --prompt 'pick some' --schema"
            """ '{"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 3}'""",
        ],
    )
    add_flag = parser.add_argument
    add_flag("-k", "--drafts", type=int, default=DRAFTS, metavar="K", help="drafts per round, 1 to 8 (default: %(default)s)")
    add_flag("--prompt", metavar="TEXT", help="ask this instead")
    add_flag("--schema", metavar="FILE|JSON", help="a JSON schema that the answer to --prompt obeys")
    add_flag("--max-new-tokens", type=int, default=128, metavar="N", help="of an answer (default: %(default)s)")
    add_flag("--repeats", type=int, default=3, metavar="N", help="how often each variant answers (default: %(default)s)")
    add_flag("--threads", type=int, metavar="N", help=THREADS)
    add_flag("--out", type=Path, default=Path("stepgraph-demo"), metavar="FOLDER", help="for picture and trace (default: %(default)s)")
    add_flag("--no-timeline", action="store_true", help="write no picture and no trace")
    add_flag("--toy", action="store_true", help="a toy pair instead: nothing to install, and no sense in the texts")
    add_flag("--json", action="store_true", help="print one JSON document and nothing else")


def run(options: argparse.Namespace) -> int:
    check(options)
    load_libraries()
    from stepgraph.runtime.demo.scenarios import SCENARIOS, Scenario
    from stepgraph.runtime.demo.variants import open_pair, toy_pair

    scenarios = list(SCENARIOS)
    if options.prompt is not None:
        schema = None if options.schema is None else read_schema("--schema", options.schema)
        scenarios = [Scenario("yours", options.prompt, schema=schema)]
    set_threads(options.threads)
    with waiting("opening the models ..."):
        pair = toy_pair() if options.toy else open_pair(options.drafts, shows_progress() and not options.json)
    settle_threads(options.threads, pair.target)
    with Demonstration(pair, scenarios, options) as clip_repr:
        document = clip_repr.run()
    if options.json:
        print_json(document)
    failed = {name: answer["failed"] for name, answer in document["answers"].items() if answer["failed"]}
    for name, told in failed.items():
        print(f"stepgraph demo: {name}: {told}", file=sys.stderr)
    return FAILED if failed else 0


def check(options: argparse.Namespace) -> None:
    if options.schema is not None and options.prompt is None:
        raise ValueError(f"--schema: got {clip_repr(options.schema)} without --prompt, want both: the scenarios have schemas of their own")
    for flag, least, most in (("drafts", 1, 8), ("max_new_tokens", 2, 4096), ("repeats", 1, 1000)):
        value = getattr(options, flag)
        if not least <= value <= most:
            raise ValueError(f"--{flag.replace('_', '-')}: got {value}, want a whole number from {least} to {most}")
    if not options.no_timeline:
        require_folder(options.out)  # at once, not behind minutes of decoding


def require_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"--out: got {clip_repr(str(folder))} ({error.strerror}), want a folder to write to, or --no-timeline") from None


class Demonstration:
    """The pair's engines, one per variant, and what is asked of them."""

    def __init__(self, pair: Pair, scenarios: list[Scenario], options: argparse.Namespace) -> None:
        import torch

        self.threads = torch.get_num_threads()
        self.pair, self.scenarios, self.options = pair, scenarios, options
        self.prompts = {scenario.name: pair.codec.chat(scenario.messages) for scenario in scenarios}
        self.cases: list[Case] = []
        self.rates: dict[str, dict[str, float]] = {}  # tokens a second, by variant and scenario
        self._colour, self._progress = wants_colour(sys.stdout) and not options.json, shows_progress() and not options.json

    def __enter__(self) -> Demonstration:
        return self

    def __exit__(self, *_: object) -> None:
        for case in self.cases:
            case.engine.close()

    def run(self) -> dict[str, Any]:
        self.prepare()
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        self._say(f"{self.pair.name}, {self.options.drafts} drafts a round, {threads}")
        if self._colour:
            self._say(", ".join(f"{COLOURS[origin]}{meaning}{RESET}" for origin, meaning in MEANINGS.items()))
        answers = {scenario.name: self.answer(scenario) for scenario in self.scenarios}
        with self._bar("race", self.options.repeats * sum(len(self._suitable(scenario)) for scenario in self.scenarios)) as bar:
            for scenario in self.scenarios:
                self.race(scenario, bar.update)
        self._say("\n" + "\n".join(table(self.cases, self.rates)))
        document: dict[str, Any] = {"pair": self.pair.name, "drafts": self.options.drafts, "threads": self.threads, "answers": answers}
        document["variants"] = [
            {**case.figures(), "tokens_per_second": self.rates[case.variant.name]} for case in self.cases if case.variant.name in self.rates
        ]
        if not self.options.no_timeline:
            document["timeline"] = self.timeline()
        return document

    def prepare(self) -> None:
        """What is refused is refused before anything is shown."""
        from stepgraph.runtime.demo.variants import Case, variants

        length = max(LEAST_LENGTH, *(len(prompt) + self.options.max_new_tokens for prompt in self.prompts.values()))
        wanted = variants(self.options.drafts)
        with self._bar("prepare", len(wanted) + len(self.scenarios)) as bar:
            for variant in wanted:
                self.cases.append(Case(variant, self.pair, length))
                bar.update()
            for scenario in self.scenarios:
                self._compiled(scenario)
                bar.update()
        for case in self.cases:
            case.engine.capture(progress=self._progress)

    def answer(self, scenario: Scenario) -> dict[str, Any]:
        """The first answers, of which the fastest variant's is shown as it comes."""
        self._say(f"\n{scenario.name}: {scenario.user}\n")
        *others, clip_repr = self._suitable(scenario)
        stream = self.pair.codec.stream()
        job = self._run(clip_repr, scenario, lambda event: self._show(event, stream.push))
        self._say(stream.finish())
        texts: dict[str, list[int]] = {}
        with self._bar("the other variants", len(others)) as bar:
            for case in others:
                texts[case.variant.name] = self._run(case, scenario).tokens
                bar.update()
        return {
            "text": self.pair.codec.decode(job.tokens),
            "finish_reason": str(job.finish_reason),
            "failed": why_failed(job, self._compiled(scenario)),
            "same_tokens": {name: tokens == job.tokens for name, tokens in texts.items()},
        }

    def race(self, scenario: Scenario, told: Callable[[], object]) -> None:
        """Variants take turns; what the first answers took is forgotten."""
        cases = self._suitable(scenario)
        for case in cases:
            case.tokens, case.seconds = 0, 0.0
        for _ in range(self.options.repeats):
            for case in cases:
                self._run(case, scenario)
                told()
        for case in cases:
            self.rates.setdefault(case.variant.name, {})[scenario.name] = round(case.tokens_per_second, 1)

    def timeline(self) -> dict[str, Any]:
        """The first answer once more, by the fastest variant: what ran when in some of its rounds."""
        scenario, trace_path, picture = self.scenarios[0], self.options.out / TRACE, self.options.out / PICTURE
        case = self._suitable(scenario)[-1]
        told = f"{picture}: what ran when; {trace_path}: the same for ui.perfetto.dev"
        drawn: str | None = str(picture)
        with self._bar("timeline", 1):
            with case.engine.trace(rounds=TRACED_ROUNDS) as trace:
                self._run(case, scenario)
            timeline, summary = trace.timeline, trace.timeline.summary()
            timeline.save_perfetto(trace_path)
            try:
                timeline.save_picture(picture)
            except RuntimeError as error:  # matplotlib is a matter of taste
                drawn, told = None, f"{trace_path}: what ran when, for ui.perfetto.dev; no picture: {error}"
        figures = "\n".join(str(summary).splitlines()[-2:])  # without its table, which the picture shows
        self._say(f"\n{figures}\n{told}")
        return {"trace": str(trace_path), "picture": drawn, "summary": summary.as_dict()}

    def _bar(self, told: str, steps: int) -> Any:
        from tqdm import tqdm

        return tqdm(total=steps, desc=told, disable=not self._progress, leave=False)

    def _compiled(self, scenario: Scenario) -> CompiledConstraint | None:
        return self.cases[-1].engine.compile(scenario.constraint) if scenario.constraint else None

    def _suitable(self, scenario: Scenario) -> list[Case]:
        """All variants, but for those that would say the same without a grammar."""
        return [case for case in self.cases if scenario.schema is not None or not case.variant.constrained]

    def _run(self, case: Case, scenario: Scenario, show: Callable[[StepEvent], object] = lambda event: None) -> Job:
        return case.run(self.prompts[scenario.name], scenario.constraint, self.options.max_new_tokens, show)

    def _show(self, event: StepEvent, text_of: Callable[[tuple[int]], str]) -> None:
        if self.options.json:
            return
        for token, origin in zip(event.tokens, event.origins, strict=True):
            text = text_of((token,))
            print(f"{COLOURS[origin.value]}{text}{RESET}" if self._colour else text, end="", flush=True)

    def _say(self, text: str) -> None:
        if not self.options.json:
            print(text)


def table(cases: list[Case], rates: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Tokens a second by scenario, then counts over all that was answered."""
    scenarios = list(dict.fromkeys(name for row in rates.values() for name in row))
    counts = {"tokens_per_round": "per round", "mask_fills": "mask fills", "replays": "replays", "host_syncs": "syncs"}
    lines = [f"{'tokens a second':<24}" + "".join(f"{name:>12}" for name in (*scenarios, *counts.values()))]
    for case in cases:
        if case.variant.name not in rates:  # nothing was asked that has a grammar
            continue
        figures, row = case.figures(), rates[case.variant.name]
        cells = [f"{row[name]:.1f}" if name in row else "" for name in scenarios] + [str(figures[key]) for key in counts]
        lines.append(f"{case.variant.name:<24}" + "".join(f"{cell:>12}" for cell in cells))
    base, fast = "plain + grammar", "speculative + grammar"
    ratios = [f"{rates[fast][name] / rates[base][name]:.2f}" if name in rates.get(base, {}) else "" for name in scenarios]
    return [*lines, f"{'speculation is worth':<24}" + "".join(f"{ratio:>12}" for ratio in ratios)] if base in rates else lines


def why_failed(job: Job, compiled: CompiledConstraint | None) -> str:
    """Empty where the answer is whole, or only cut short, and a matcher that knows nothing of the engine takes it."""
    if job.finish_reason in ("error", "dead_end"):
        return f"{job.finish_reason}: {job.error or 'nothing may follow'}"
    matcher = compiled.matcher() if compiled else None
    if matcher is not None and not all(matcher.accept_token(token) for token in job.tokens):
        return "the answer breaks its schema"
    return ""
