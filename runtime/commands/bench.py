"""`stepgraph bench`: what speculation and grammars do for this model on this machine, by turns in one run."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from stepgraph.runtime.commands.inputs import THREADS, read_file, set_threads, settle_threads
from stepgraph.runtime.commands.request import DTYPES, add_draft_flags, dtype_of, look_up_of
from stepgraph.runtime.commands.terminal import FAILED, describe, load_libraries, print_json, shows_progress, waiting
from stepgraph.sampling.fields import clip_repr

if TYPE_CHECKING:
    from stepgraph.runtime.demo.variants import Case, Pair, Variant
    from stepgraph.runtime.text import TextCodec
    from stepgraph.sampling.grammar import Constraint

SUMMARY = "tokens per second of a model here: plain and speculative, with and without a grammar"
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
    constraint: Constraint  # of the variants with a grammar


@dataclass
class Measured:
    """A variant's engine and its speed in each repeat."""

    case: Case
    rates: list[float]

    def figures(self) -> dict[str, Any]:
        stats = self.case.engine.stats()
        return {
            **self.case.figures(),
            "tokens_per_second": median(self.rates),
            "least": min(self.rates),
            "most": max(self.rates),
            "accepted_length": stats.drafting.accepted_length or None,  # where nothing was drafted
        }


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Answer the same prompts plainly and speculatively, with and without a grammar, by turns. Everything is greedy; tokens per second\n"
        "count from a text's first token on, prompts are not shared; the table shows the median, least and most of the repeats.\n"
        "Exit code 1: an answer failed.",
        [
            "stepgraph bench toy --repeats 2 --max-new-tokens 32",
            "stepgraph bench model --draft ngram -k 4 --prompts prompts.jsonl --repeats 1 --max-new-tokens 24 --json",
        ],
    )
    parser.add_argument("model", metavar="MODEL", help=f"a Hugging Face folder, a .gguf file, or {TOY}, which is seeded noise")
    parser.add_argument(
        "--prompts", metavar="FILE", help="lines of JSON with text, messages or token_ids, and a schema (default: two built-in prompts)"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="times that each variant answers each prompt (default: 3)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="the longest answer (default: 128)")
    add_draft_flags(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and cache (default: the model's own)")
    parser.add_argument("--threads", type=int, metavar="N", help=THREADS)
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def run(options: argparse.Namespace) -> int:
    for flag, least in (("repeats", 1), ("max_new_tokens", 2)):
        if getattr(options, flag) < least:
            raise ValueError(f"--{flag.replace('_', '-')}: got {getattr(options, flag)}, want at least {least}")
    load_libraries()
    from stepgraph.runtime.demo.variants import Case

    set_threads(options.threads)
    with waiting("opening the model ..."):
        pair, prompts = _opened(options)
    settle_threads(options.threads, pair.target)
    longest = max(len(prompt.token_ids) for prompt in prompts) + options.max_new_tokens
    cases: list[Case] = []
    try:
        for variant in _variants(options):
            cases.append(Case(variant, pair, longest))
            cases[-1].engine.capture(progress=shows_progress())
        measured = [Measured(case, []) for case in cases]
        same, failed = _measure(measured, prompts, options)
        document = _document(options, pair, len(prompts), measured, same, failed)
    finally:
        for case in cases:
            case.engine.close()
    if options.json:
        print_json(document)
    else:
        _print_table(document)
    for told in failed:
        print(f"stepgraph bench: {told}", file=sys.stderr)
    return FAILED if failed else 0


def _variants(options: argparse.Namespace) -> tuple[Variant, ...]:
    from stepgraph.runtime.demo.variants import Variant

    plain = (Variant("plain", 0, False), Variant("plain + grammar", 0, True))
    if not options.drafts or options.draft == "none":
        return plain
    modes = look_up_of(options)
    return (*plain, Variant("speculative", options.drafts, False, modes), Variant("speculative + grammar", options.drafts, True, modes))


def _opened(options: argparse.Namespace) -> tuple[Pair, list[Prompt]]:
    """Prompts are read before weights are: what is wrong with them shows at once."""
    from stepgraph.runtime.config import EngineConfig
    from stepgraph.runtime.demo.variants import Pair, toy_pair
    from stepgraph.runtime.models.files.loading import load_models
    from stepgraph.runtime.text import TextCodec

    if options.model == TOY:
        pair = toy_pair()
        return pair, _prompts(options, pair.codec)
    codec = TextCodec.open(options.model)
    prompts = _prompts(options, codec)
    config = EngineConfig(max_rows=1, num_speculative_tokens=options.drafts)
    loaded = load_models(options.model, options.draft, config, dtype=dtype_of(options), progress=shows_progress())
    return Pair(options.model, loaded.target, loaded.draft, codec), prompts


def _prompts(options: argparse.Namespace, codec: TextCodec) -> list[Prompt]:
    from stepgraph.runtime.demo.scenarios import SCENARIOS

    if options.prompts is None:
        return [Prompt(_ids({"messages": each.messages}, codec), each.constraint) for each in SCENARIOS if each.constraint]
    found = []
    text = read_file("--prompts", options.prompts, "the path of a file with lines of JSON")
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() would cut at some letters too
        if line.strip():
            try:
                found.append(_prompt(line, codec))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"--prompts {options.prompts}:{number}: {error}") from None
    if not found:
        raise ValueError(f"--prompts: got {clip_repr(options.prompts)} without a line, want at least one prompt")
    return found


def _prompt(line: str, codec: TextCodec) -> Prompt:
    from stepgraph.sampling.grammar import Constraint

    entry = json.loads(line)
    names = entry.keys() - {"schema"} if isinstance(entry, dict) else ()
    if len(names) != 1 or not names <= {"text", "messages", "token_ids"}:
        raise ValueError(f"got {clip_repr(line)}, want an object with one of text, messages, token_ids, a schema or none, and no more")
    constraint = Constraint.json_schema(entry["schema"]) if "schema" in entry else Constraint.json_object()
    ids, most = _ids(entry, codec), codec.vocabulary.logits_width
    if not isinstance(ids, list) or not ids or not all(type(each) is int and 0 <= each < most for each in ids):
        raise ValueError(f"got {clip_repr(line)}, want at least one token, and ids from 0 to {most - 1}")
    return Prompt(ids, constraint)


def _ids(entry: dict[str, Any], codec: TextCodec) -> list[int]:
    if "text" in entry:
        return codec.encode(entry["text"])
    if "messages" in entry and codec.has_chat:
        return codec.chat(entry["messages"])
    if "messages" in entry:  # a model that was not trained to chat goes on with what was said
        try:
            return codec.encode("\n\n".join(message["content"] for message in entry["messages"]) + "\n\n")
        except (KeyError, TypeError):
            raise ValueError(f"messages: got {clip_repr(str(entry['messages']))}, want a list of objects with a content") from None
    ids: list[int] = entry["token_ids"]
    return ids


def _measure(measured: list[Measured], prompts: list[Prompt], options: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """How often speculation left a text as it was, and what failed. The first pass is not counted: it warms everything up."""
    from tqdm import tqdm

    same, failed = dict.fromkeys((False, True), 0), []
    turns = (1 + options.repeats) * len(measured) * len(prompts)
    with tqdm(total=turns, desc="bench", unit="answer", disable=not shows_progress(), leave=False) as bar:
        for repeat in range(1 + options.repeats):
            texts: dict[tuple[int, bool], list[int]] = {}
            for one in measured[repeat % len(measured) :] + measured[: repeat % len(measured)]:
                before = one.case.tokens, one.case.seconds
                for place, prompt in enumerate(prompts):
                    job = one.case.run(prompt.token_ids, prompt.constraint, options.max_new_tokens)
                    bar.update()
                    if job.finish_reason in ("error", "dead_end"):
                        failed.append(f"{one.case.variant.name}, prompt {place + 1}: {job.finish_reason}: {job.error}")
                    other = texts.setdefault((place, one.case.variant.constrained), job.tokens)
                    same[one.case.variant.constrained] += repeat > 0 and other is not job.tokens and other == job.tokens
                if repeat:
                    seconds = one.case.seconds - before[1]
                    one.rates.append((one.case.tokens - before[0]) / seconds if seconds else 0.0)
    compared = options.repeats * len(prompts) * (len(measured) > 2)
    return {name: f"{same[kind]} of {compared}" for name, kind in (("free", False), ("grammar", True))}, failed


def _document(
    options: argparse.Namespace, pair: Pair, prompts: int, measured: list[Measured], same: dict[str, str], failed: list[str]
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
        "same_texts": same,
        "failed": failed,
        "variants": [one.figures() for one in measured],
    }


def _print_table(document: dict[str, Any]) -> None:
    print(f"{document['model']}, draft {document['draft']}, K = {document['drafts']}, {document['device']}, {document['threads']} threads")
    widths = [max(len(title), 8) + 2 for title, _ in COLUMNS]
    print(f"{'':<24}" + "".join(f"{title:>{width}}" for (title, _), width in zip(COLUMNS, widths, strict=True)))
    for row in document["variants"]:
        cells = zip((_cell(row[name]) for _, name in COLUMNS), widths, strict=True)
        print(f"{row['variant']:<24}" + "".join(f"{text:>{width}}" for text, width in cells))
    same = document["same_texts"]
    print(f"texts that speculation left as they were: {same['free']} free, {same['grammar']} under a grammar")


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
