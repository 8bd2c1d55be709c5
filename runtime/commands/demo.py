"""`stepgraph demo`: a constrained generation with the toy pair, the capture report, and what the rounds did.

The toy pair is seeded noise with a grammar in front of it: its texts are legal, not sensible.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from stepgraph.runtime.commands.inputs import read_schema
from stepgraph.runtime.commands.terminal import describe, shows_progress, wants_colour

if TYPE_CHECKING:
    from stepgraph.runtime.engine import Engine
    from stepgraph.runtime.request import Job
    from stepgraph.sampling.grammar import Vocabulary

SUMMARY = "generate constrained text with the toy pair and show what the rounds did"

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Lisbon", "Oslo", "Quito"]},
        "celsius": {"type": "integer", "minimum": -40, "maximum": 60},
        "sunny": {"type": "boolean"},
        "wind": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "celsius", "sunny", "wind"],
    "additionalProperties": False,
}
DRAFT, TARGET_TOKEN, RESET = "\x1b[32m", "\x1b[1m", "\x1b[0m"


@dataclass(frozen=True)
class Variant:
    """One way to decode the same requests."""

    name: str
    drafts: int
    draft_masks: bool = True


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Decode the same requests plainly and speculatively, compare the tokens, and print the capture report.",
        ["stepgraph demo", """stepgraph demo -k 2 --json --schema '{"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3}'"""],
    )
    parser.add_argument("-k", "--drafts", type=int, default=4, help="drafts per round, 0 to 8 (default: 4)")
    parser.add_argument(
        "--agreement", type=float, default=0.8, help="how often the toy draft agrees with its target, 0 to 1 (default: 0.8)"
    )
    parser.add_argument("--schema", metavar="FILE|JSON", help="a JSON schema to obey (default: a weather report)")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--no-colour", action="store_true", help="no colours, even on a terminal")


def run(options: argparse.Namespace) -> int:
    return run_demo(
        options.drafts,
        options.agreement,
        None if options.schema is None else read_schema("--schema", options.schema),
        colour=wants_colour(sys.stdout) and not options.no_colour and not options.json,
        quiet=options.json or not shows_progress(),
        as_json=options.json,
    )


def run_demo(drafts: int, agreement: float, schema: dict[str, Any] | None, *, colour: bool, quiet: bool, as_json: bool) -> int:
    """Print the demonstration; returns the exit code: 1 where a text was illegal or two variants disagreed."""
    from stepgraph.sampling.grammar import Constraint, Vocabulary

    vocabulary = Vocabulary.printable()
    constraints = {
        "JSON schema": Constraint.json_schema(schema or SCHEMA),
        "regex": Constraint.regex(r"[A-Z][a-z]{2,8} [0-9]{4}-[0-9]{2}-[0-9]{2}"),
        "choice": Constraint.choice(["accept", "reject", "ask a human"]),
        "free": None,
    }
    variants = [Variant("plain", 0), Variant("speculative, masked drafts", drafts), Variant("speculative, unmasked drafts", drafts, False)]
    if not drafts:
        variants = variants[:1]
    answers: list[dict[str, Job]] = []
    figures: list[dict[str, Any]] = []
    for variant in variants:
        with _engine(vocabulary, variant, agreement) as engine:
            report = engine.capture(progress=not quiet)
            if variant is variants[-1 if len(variants) == 1 else 1] and not as_json:
                print(report, end="\n\n")
            for constraint in filter(None, constraints.values()):
                engine.compile(constraint)  # else each job would begin when its grammar is there, and rounds would not compare
            prompt = list(b"weather report: ")
            jobs = {
                name: engine.submit([byte - 32 for byte in prompt], constraint=constraint, max_new_tokens=96)
                for name, constraint in constraints.items()
            }
            show = variant is variants[min(1, len(variants) - 1)] and not as_json
            for event in engine.stream():
                if show and event.job_id == jobs["JSON schema"].id:
                    _print_tokens(vocabulary, event.tokens, event.num_accepted_drafts, colour)
            if show:
                print("\n" + ("(green: drafts that held, bold: chosen by the target)\n" if colour else ""))
            answers.append(jobs)
            figures.append({"variant": variant.name, **asdict(engine.stats())})
    same = all(
        {name: job.tokens for name, job in jobs.items()} == {name: job.tokens for name, job in answers[0].items()} for jobs in answers
    )
    outputs = {name: (vocabulary.decode(job.tokens).decode(errors="replace"), str(job.finish_reason)) for name, job in answers[-1].items()}
    legal = _is_json(outputs["JSON schema"])
    if as_json:
        print(json.dumps({"same_tokens": same, "legal": legal, "outputs": outputs, "variants": figures}, indent=2))
    else:
        _print_summary(outputs, figures, same)
    return 0 if same and legal else 1


def _engine(vocabulary: Vocabulary, variant: Variant, agreement: float) -> Engine:
    from stepgraph.runtime.config import EngineConfig
    from stepgraph.runtime.engine import Engine
    from stepgraph.runtime.models.toy import ToyDraft, ToyTarget

    target = ToyTarget(vocabulary.logits_width, seed=7)
    config = EngineConfig(
        max_rows=4, num_speculative_tokens=variant.drafts, max_length=256, draft_masks=variant.draft_masks, greedy_only=True
    )
    return Engine(target, ToyDraft(target, agreement), vocabulary=vocabulary, config=config)


def _print_tokens(vocabulary: Vocabulary, tokens: tuple[int, ...], accepted: int, colour: bool) -> None:
    for place, token in enumerate(tokens):
        text = vocabulary.decode([token]).decode(errors="replace")
        print(f"{DRAFT if place < accepted else TARGET_TOKEN}{text}{RESET}" if colour else text, end="", flush=True)


def _print_summary(outputs: dict[str, tuple[str, str]], figures: list[dict[str, Any]], same: bool) -> None:
    for name, (text, reason) in outputs.items():
        print(f"{name:>12}  {text!r}  [{reason}]")
    print(f"\n{'':<30}{'tokens':>8}{'rounds':>8}{'replays':>9}{'syncs':>7}{'drafts kept':>13}{'mask fills':>12}")
    for row in figures:
        print(
            f"{row['variant']:<30}{row['tokens']:>8}{row['rounds']:>8}{row['replays']:>9}{row['host_syncs']:>7}"
            f"{row['accepted_drafts']:>13}{row['mask_fills']:>12}"
        )
    print("\nall variants gave the same tokens" if same else "\nTHE VARIANTS DISAGREE")


def _is_json(output: tuple[str, str]) -> bool:
    try:
        return isinstance(json.loads(output[0]), (dict, list, str, int, float, bool, type(None)))
    except ValueError:
        return output[1] == "length"  # cut short
