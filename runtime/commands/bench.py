"""`stepgraph bench`: tokens per second of a model on this machine, with and without speculation and grammars."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from stepgraph.runtime.commands import options as flags
from stepgraph.runtime.commands.terminal import (
    FAILED,
    add_json_flag,
    describe,
    load_libraries,
    print_error,
    print_json,
    print_text,
    shows_progress,
    waiting,
)
from stepgraph.sampling.fields import clip_repr

if TYPE_CHECKING:
    from stepgraph.runtime.demo.variants import Case, Pair, Variant
    from stepgraph.runtime.text import TextCodec
    from stepgraph.sampling.grammar import Constraint

SUMMARY = "measure tokens per second of a model: plain and speculative, with and without a grammar"
TOY = "toy"
COLUMNS = (
    ("tokens/s", "tokens_per_second"),
    ("least", "least"),
    ("most", "most"),
    ("tokens/round", "tokens_per_round"),
    ("accepted length", "accepted_length"),
    ("rounds", "rounds"),
    ("replays", "replays"),
    ("syncs", "host_syncs"),
    ("mask fills", "mask_fills"),
)


class Prompt(NamedTuple):
    token_ids: list[int]
    constraint: Constraint  # for the variants with a grammar


@dataclass
class Measured:
    """A variant and its tokens per second in each repeat."""

    case: Case
    rates: list[float]

    def figures(self) -> dict[str, Any]:
        stats = self.case.engine.stats()
        return {
            **self.case.figures(),
            "tokens_per_second": median(self.rates),
            "least": min(self.rates),
            "most": max(self.rates),
            "accepted_length": stats.drafting.accepted_length or None,
        }


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Answer the same prompts with and without speculation and with and without grammars, the variants interleaved. Decoding is\n"
        "greedy; tokens per second count from the first token of an answer; cached prompts are not reused. The table shows the\n"
        "median, least and most of the repeats. Exit code 1: an answer failed.",
        [
            "stepgraph bench toy --repeats 2 --max-new-tokens 32",
            "stepgraph bench model --draft ngram -k 4 --prompts prompts.jsonl --repeats 1 --max-new-tokens 24 --json",
        ],
    )
    parser.add_argument("model", metavar="MODEL", help=f"a Hugging Face folder, a .gguf file, or {TOY} for the seeded toy pair")
    prompts = "JSON lines with text, messages or token_ids, and optionally a schema (default: two built-in prompts)"
    parser.add_argument("--prompts", metavar="FILE", help=prompts)
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="answers of each variant to each prompt (default: 3)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="maximum length of an answer (default: 128)")
    flags.add_draft_flags(parser)
    flags.add_dtype_flag(parser)
    flags.add_threads_flag(parser)
    add_json_flag(parser)


def run(options: argparse.Namespace) -> int:
    flags.check_range(options, "repeats", 1)
    flags.check_range(options, "max-new-tokens", 2)
    load_libraries()
    from stepgraph.runtime.demo.variants import Case

    flags.set_threads(options)
    with waiting("opening the model ..."):
        pair, prompts = _open(options)
    flags.set_default_threads(options, pair.target)
    longest = max(len(prompt.token_ids) for prompt in prompts) + options.max_new_tokens
    cases: list[Case] = []
    try:
        for variant in _variants(options):
            cases.append(Case(variant, pair, longest))
            cases[-1].engine.capture(progress=shows_progress())
        measured = [Measured(case, []) for case in cases]
        same_texts, failed = _measure(measured, prompts, options)
        document = _document(options, pair, len(prompts), measured, same_texts, failed)
    finally:
        for case in cases:
            case.engine.close()
    if options.json:
        print_json(document)
    else:
        _print_table(document)
    for failure in failed:
        print_error(f"stepgraph bench: {failure}")
    return FAILED if failed else 0


def _variants(options: argparse.Namespace) -> tuple[Variant, ...]:
    from stepgraph.runtime.demo.variants import Variant

    plain = (Variant("plain", 0, False), Variant("plain + grammar", 0, True))
    if not options.drafts or options.draft == "none":
        return plain
    look_up = flags.look_up_of(options)
    return (*plain, Variant("speculative", options.drafts, False, look_up), Variant("speculative + grammar", options.drafts, True, look_up))


def _open(options: argparse.Namespace) -> tuple[Pair, list[Prompt]]:
    """The prompts are checked before the weights are read."""
    from stepgraph.runtime.config import EngineConfig
    from stepgraph.runtime.demo.variants import Pair, toy_pair
    from stepgraph.runtime.models.files.loading import load_models
    from stepgraph.runtime.text import TextCodec

    if options.model == TOY:
        pair = toy_pair()
        return pair, _read_prompts(options, pair.codec)
    codec = TextCodec.open(options.model)
    prompts = _read_prompts(options, codec)
    config = EngineConfig(max_rows=1, num_speculative_tokens=options.drafts)
    loaded = load_models(options.model, options.draft, config, dtype=flags.dtype_of(options), progress=shows_progress())
    return Pair(options.model, loaded.target, loaded.draft, codec), prompts


def _read_prompts(options: argparse.Namespace, codec: TextCodec) -> list[Prompt]:
    from stepgraph.runtime.demo.scenarios import SCENARIOS

    if options.prompts is None:
        return [Prompt(_encode({"messages": each.messages}, codec), each.constraint) for each in SCENARIOS if each.constraint]
    prompts = []
    text = flags.read_file("--prompts", options.prompts, "the path of a file with JSON lines")
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() also splits at U+2028 and others
        if line.strip():
            try:
                prompts.append(_read_prompt(line, codec))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"--prompts {options.prompts}:{number}: {error}") from None
    if not prompts:
        raise ValueError(f"--prompts: got {clip_repr(options.prompts)}, which has no prompts, expected at least one")
    return prompts


def _read_prompt(line: str, codec: TextCodec) -> Prompt:
    from stepgraph.sampling.grammar import Constraint

    entry = json.loads(line)
    names = entry.keys() - {"schema"} if isinstance(entry, dict) else ()
    if len(names) != 1 or not names <= {"text", "messages", "token_ids"}:
        accepted = "an object with one of text, messages, token_ids, and optionally a schema"
        raise ValueError(f"got {clip_repr(line)}, expected {accepted}")
    constraint = Constraint.json_schema(entry["schema"]) if "schema" in entry else Constraint.json_object()
    ids, width = _encode(entry, codec), codec.vocabulary.logits_width
    if not isinstance(ids, list) or not ids or not all(type(each) is int and 0 <= each < width for each in ids):
        raise ValueError(f"got {clip_repr(line)}, expected at least one token, with ids from 0 to {width - 1}")
    return Prompt(ids, constraint)


def _encode(entry: dict[str, Any], codec: TextCodec) -> list[int]:
    if "text" in entry:
        return codec.encode(entry["text"])
    if "messages" in entry and codec.has_chat:
        return codec.chat(entry["messages"])
    if "messages" in entry:  # a model without a chat template continues the contents
        try:
            return codec.encode("\n\n".join(message["content"] for message in entry["messages"]) + "\n\n")
        except (KeyError, TypeError):
            raise ValueError(f"messages: got {clip_repr(entry['messages'])}, expected a list of objects with a content") from None
    ids: list[int] = entry["token_ids"]
    return ids


def _measure(measured: list[Measured], prompts: list[Prompt], options: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """How many speculative answers equal the plain ones, and the failures. The first repeat warms up and is not counted."""
    from tqdm import tqdm

    same, failed = dict.fromkeys((False, True), 0), []
    total = (1 + options.repeats) * len(measured) * len(prompts)
    with tqdm(total=total, desc="bench", unit="answer", disable=not shows_progress(), leave=False) as bar:
        for repeat in range(1 + options.repeats):
            texts: dict[tuple[int, bool], list[int]] = {}
            for one in measured[repeat % len(measured) :] + measured[: repeat % len(measured)]:
                tokens, seconds = one.case.tokens, one.case.seconds
                constrained = one.case.variant.constrained
                for index, prompt in enumerate(prompts):
                    job = one.case.run(prompt.token_ids, prompt.constraint, options.max_new_tokens)
                    bar.update()
                    if job.finish_reason in ("error", "dead_end"):
                        failed.append(f"{one.case.variant.name}, prompt {index + 1}: {job.finish_reason}: {job.error}")
                    other = texts.setdefault((index, constrained), job.tokens)
                    same[constrained] += repeat > 0 and other is not job.tokens and other == job.tokens
                if repeat:
                    seconds = one.case.seconds - seconds
                    one.rates.append((one.case.tokens - tokens) / seconds if seconds else 0.0)
    compared = options.repeats * len(prompts) * (len(measured) > 2)
    return {name: f"{same[constrained]} of {compared}" for name, constrained in (("free", False), ("grammar", True))}, failed


def _document(
    options: argparse.Namespace, pair: Pair, prompts: int, measured: list[Measured], same_texts: dict[str, str], failed: list[str]
) -> dict[str, Any]:
    import torch

    return {
        "model": pair.name,
        "draft": options.draft if options.model != TOY else TOY,
        "drafts": options.drafts,
        "prompts": prompts,
        "repeats": options.repeats,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": measured[0].case.engine.backend.name,
        "same_texts": same_texts,
        "failed": failed,
        "variants": [one.figures() for one in measured],
    }


def _print_table(document: dict[str, Any]) -> None:
    setting = f"draft {document['draft']}, K = {document['drafts']}, {document['device']}, {document['threads']} threads"
    print_text(f"{document['model']}, {setting}")
    widths = [max(len(title), 8) + 2 for title, _ in COLUMNS]
    print_text(f"{'':<24}" + "".join(f"{title:>{width}}" for (title, _), width in zip(COLUMNS, widths, strict=True)))
    for row in document["variants"]:
        cells = zip((_cell(row[name]) for _, name in COLUMNS), widths, strict=True)
        print_text(f"{row['variant']:<24}" + "".join(f"{text:>{width}}" for text, width in cells))
    same = document["same_texts"]
    print_text(f"speculative answers equal to the plain ones: {same['free']} without a grammar, {same['grammar']} with one")


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
