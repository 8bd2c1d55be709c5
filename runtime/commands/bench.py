"""`stepgraph bench`: tokens per second of a model on this machine, with and without speculation and grammars."""

from __future__ import annotations

import argparse
import contextlib
from statistics import median
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from stepgraph.runtime.commands import engines, terminal
from stepgraph.runtime.commands.flags import TOY
from stepgraph.runtime.commands.inputs import read_file
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.demo.variants import SCENARIOS, Case, Pair, tokens_per_second, toy_pair, variants
from stepgraph.runtime.text import TextCodec
from stepgraph.sampling.fields import clip_repr, parse_exact_json
from stepgraph.sampling.grammar import Constraint
from stepgraph.sampling.grammar.compile.backends import check_constraints

COLUMNS = {
    "tokens/s": "tokens_per_second",
    "least": "least",
    "most": "most",
    "tokens/round": "tokens_per_round",
    "accepted length": "accepted_length",
    "rounds": "rounds",
    "replays": "replays",
    "syncs": "host_syncs",
    "host masks": "mask_fills",
}


README_RATES = {"plain": 66, "plain + grammar": 67, "speculative": 148, "speculative + grammar": 165}  # tokens per second
COMPARISONS = (("plain + grammar", "plain"), ("speculative", "plain"), ("speculative + grammar", "plain + grammar"))


class Prompt(NamedTuple):
    token_ids: list[int]
    constraint: Constraint | None  # for the variants with a grammar


def run(options: argparse.Namespace) -> int:
    engines.set_threads(options)
    with terminal.waiting("opening the model ..."):
        pair, prompts, longest = _open(options)
    speculative = options.drafts and options.draft != "none"
    with contextlib.ExitStack() as stack:
        cases = []
        for variant in variants(options.drafts, options.look_up, None, options.draft_length)[: 4 if speculative else 2]:
            cases.append(Case(variant, pair, longest))
            stack.enter_context(cases[-1].engine).capture(progress=terminal.shows_progress())
        equal, failed = _measure(cases, prompts, options)
        compared = options.repeats * len(prompts) * (len(cases) > 2)
        document: dict[str, Any] = {
            "model": pair.name,
            "draft": options.draft if options.model != TOY else TOY,
            "drafts": options.drafts,
            "draft_length": options.draft_length,
            "prompts": len(prompts),
            "repeats": options.repeats,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "device": cases[0].engine.backend.name,
            "same_texts": {name: f"{equal[constrained]} of {compared}" for name, constrained in (("free", False), ("grammar", True))},
            "failed": failed,
            "variants": [_figures(case, len(prompts)) for case in cases],
        }
        document["ratios"] = ratios(document["variants"])
    terminal.print_document(document, options.json, _lines)
    return terminal.report_failures("bench", failed)


def _open(options: argparse.Namespace) -> tuple[Pair, list[Prompt], int]:
    """The models, the prompts, which are checked before the weights are read, and the largest length of an answer with its prompt."""
    pair = toy_pair() if options.model == TOY else None
    codec = TextCodec.open(options.model) if pair is None else pair.codec
    prompts = _read_prompts(options, codec)
    longest = max(len(prompt.token_ids) for prompt in prompts) + options.max_new_tokens
    sources = {"draft_length": options.draft_length, "look_up": options.look_up}
    config = EngineConfig(max_rows=1, num_speculative_tokens=options.drafts, max_length=longest, **sources)
    if pair is not None:
        return pair, prompts, longest
    loaded = engines.load(options, config, terminal.shows_progress())
    return Pair(options.model, loaded.target, loaded.draft, codec), prompts, longest


def _read_prompts(options: argparse.Namespace, codec: TextCodec) -> list[Prompt]:
    if options.prompts is None:
        return [Prompt(_encode({"messages": each.messages}, codec), each.constraint) for each in SCENARIOS if each.constraint]
    prompts = []
    text = read_file("--prompts", options.prompts, "the path of a file with JSON lines")
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() also splits at U+2028 and others
        if line.strip():
            try:
                prompts.append(_read_prompt(line, codec))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"--prompts {options.prompts}:{number}: {error}") from None
    if not prompts:
        raise ValueError(f"--prompts: got {clip_repr(options.prompts)}, which has no prompts, expected at least one")
    check_constraints(filter(None, (prompt.constraint for prompt in prompts)))
    return prompts


def _read_prompt(line: str, codec: TextCodec) -> Prompt:
    entry = parse_exact_json(line)
    names = entry.keys() - {"schema"} if isinstance(entry, dict) else ()
    if len(names) != 1 or not names <= {"text", "messages"}:
        raise ValueError(f"got {clip_repr(line)}, expected an object with text or messages, and optionally a schema")
    constraint = Constraint.json_schema(entry["schema"]) if "schema" in entry else Constraint.json_object()
    if not (ids := _encode(entry, codec)):
        raise ValueError(f"got {clip_repr(line)}, which has no tokens, expected at least one")
    return Prompt(ids, constraint)


def _encode(entry: dict[str, Any], codec: TextCodec) -> list[int]:
    if "text" in entry:
        return codec.encode(entry["text"])
    if codec.has_chat:
        return codec.chat(entry["messages"])
    try:  # a model without a chat template continues the contents
        return codec.encode("\n\n".join(message["content"] for message in entry["messages"]) + "\n\n")
    except (KeyError, TypeError):
        raise ValueError(f"messages: got {clip_repr(entry['messages'])}, expected a list of objects with a content") from None


def _measure(cases: list[Case], prompts: list[Prompt], options: argparse.Namespace) -> tuple[dict[bool, int], list[str]]:
    """How many speculative answers equal the plain ones, without and with a grammar, and the failures. The first repeat is a warm-up."""
    equal, failed = {False: 0, True: 0}, []
    total = (1 + options.repeats) * len(cases) * len(prompts)
    with tqdm(total=total, desc="bench", unit="answer", disable=not terminal.shows_progress(), leave=False) as bar:
        for repeat in range(1 + options.repeats):
            texts: dict[tuple[int, bool], list[int]] = {}
            for case in cases[repeat % len(cases) :] + cases[: repeat % len(cases)]:
                constrained = case.variant.constrained
                for index, prompt in enumerate(prompts):
                    job = case.run(prompt.token_ids, prompt.constraint, options.max_new_tokens)
                    bar.update()
                    if failure := engines.failure_of(job):
                        failed.append(f"{case.variant.name}, prompt {index + 1}: {failure}")
                    other = texts.setdefault((index, constrained), job.tokens)
                    equal[constrained] += repeat > 0 and other is not job.tokens and other == job.tokens
    return equal, failed


def _figures(case: Case, prompts: int) -> dict[str, Any]:
    """The figures of one variant, without the first repeat."""
    rates = [tokens_per_second(case.times[start : start + prompts]) for start in range(prompts, len(case.times), prompts)]
    return {
        **case.figures(),
        "tokens_per_second": median(rates),
        "least": min(rates),
        "most": max(rates),
        "accepted_length": case.engine.stats().drafting.accepted_length or None,
    }


def ratios(variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ratios of tokens per second: each is the ratio of tokens per round, divided by the ratio of round times."""
    rows = {row["variant"]: row for row in variants}
    found = []
    for name, base in COMPARISONS:
        if name in rows and rows[base]["tokens_per_second"] and rows[name]["tokens_per_second"]:
            rate, tokens = (rows[name][field] / rows[base][field] for field in ("tokens_per_second", "tokens_per_round"))
            figures = {"ratio": rate, "tokens_per_round": tokens, "time_of_a_round": tokens / rate}
            found.append({"of": name, "to": base, **figures, "readme": README_RATES[name] / README_RATES[base]})
    return found


def _lines(document: dict[str, Any]) -> list[str]:
    rows = [[row["variant"], *(_cell(row[name]) for name in COLUMNS.values())] for row in document["variants"]]
    compared = [
        [f"{row['of']} : {row['to']}", *(f"{row[name]:.2f}" for name in ("ratio", "tokens_per_round", "time_of_a_round", "readme"))]
        for row in document["ratios"]
    ]
    setting = f"draft {document['draft']}, K = {document['drafts']}, {document['device']}, {document['threads']} threads"
    equal = document["same_texts"]
    return [
        f"{document['model']}, {setting}",
        *terminal.table(["", *COLUMNS], rows),
        *terminal.table(["", "ratio", "of tokens/round", "of times of a round", "in README"], compared),
        "ratio of tokens/s = ratio of tokens/round divided by ratio of times of a round; in README: measured with the pair of the demo",
        f"speculative answers equal to the plain ones: {equal['free']} without a grammar, {equal['grammar']} with one",
    ]


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
