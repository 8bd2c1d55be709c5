"""The flags of one request: what its text must obey, how its tokens are chosen."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from stepgraph.runtime.commands.inputs import read_file, read_schema, token_ids
from stepgraph.sampling.fields import clip_repr

if TYPE_CHECKING:
    import torch

    from stepgraph.runtime.text import TextCodec
    from stepgraph.sampling.grammar import Constraint
    from stepgraph.sampling.params import SamplingParams

SAMPLING = {
    "temperature": (float, "0: always the likeliest token (default: 0)"),
    "top_p": (float, "keep the likeliest tokens until they sum to this share"),
    "top_k": (int, "keep this many of the likeliest tokens"),
    "min_p": (float, "drop tokens less likely than this share of the likeliest"),
    "seed": (int, "the same seed gives the same text"),
    "repetition_penalty": (float, "divide the logits of tokens that were there already"),
    "presence_penalty": (float, "take this from the logits of tokens in the answer"),
    "frequency_penalty": (float, "the same, once for every time"),
    "min_new_tokens": (int, "no stop token before"),
}
DTYPES = ("bfloat16", "float16", "float32")
KINDS = {".ebnf": "ebnf", ".gbnf": "ebnf", ".lark": "lark"}


def add_draft_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("who drafts")
    words = "auto, ngram, forced, mtp, none, or the folder of a draft (default: auto)"
    group.add_argument("--draft", default="auto", metavar="WORD|FOLDER", help=words)
    group.add_argument("-k", "--drafts", type=int, default=4, metavar="N", help="drafts per round, 0 to 8 (default: 4)")
    told = "beside a draft model, propose what was said before, where N tokens are the same"
    group.add_argument("--look-up", type=int, metavar="N", help=told)


def dtype_of(options: argparse.Namespace) -> torch.dtype | None:
    import torch

    return getattr(torch, options.dtype) if options.dtype else None


def look_up_of(options: argparse.Namespace) -> dict[str, Any]:
    """For EngineConfig."""
    return {} if options.look_up is None else {"look_up": options.look_up}


def add_constraint_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what the text must obey (at most one, and --after)")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--schema", metavar="FILE|JSON", help="a JSON schema: a file, or the text itself")
    one.add_argument("--regex", metavar="PATTERN", help="a regular expression, from end to end")
    one.add_argument("--grammar", metavar="FILE", help="a grammar in GBNF (.ebnf, .gbnf) or Lark (.lark) notation")
    one.add_argument("--choice", metavar="TEXT", action="append", help="one of these texts; give it several times")
    one.add_argument("--json-object", action="store_true", help="any JSON object")
    group.add_argument("--grammar-kind", choices=sorted(set(KINDS.values())), help="the notation, where the file's ending does not say")
    group.add_argument("--after", metavar="MARKER", help="obey only behind this text or control token, such as </think>")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how tokens are chosen")
    for name, (kind, told) in SAMPLING.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper(), help=told)
    group.add_argument("--stop", metavar="IDS", help="token ids that end the text besides the model's own, such as 2,13")


def check_constraint_flags(options: argparse.Namespace) -> None:
    """What is wrong with them by themselves. Files are read here, and their texts take the place of their names."""
    if options.schema is not None:
        options.schema = read_schema("--schema", options.schema)
    if options.grammar is None and options.grammar_kind is not None:
        raise ValueError(f"--grammar-kind: got {options.grammar_kind}, want it beside --grammar")
    if options.grammar is not None:
        options.grammar_kind = options.grammar_kind or KINDS.get(options.grammar[options.grammar.rfind(".") :])
        if options.grammar_kind is None:
            raise ValueError(f"--grammar: got {clip_repr(options.grammar)}, want a file that ends in {', '.join(KINDS)}, or --grammar-kind")
        options.grammar = read_file("--grammar", options.grammar, "the path of a grammar")
    constrained = options.json_object or any(getattr(options, name) is not None for name in ("schema", "regex", "grammar", "choice"))
    if options.after is not None and not constrained:
        raise ValueError(f"--after: got {clip_repr(options.after)}, want it beside --schema, --regex, --grammar, --choice or --json-object")


def constraint_of(options: argparse.Namespace, codec: TextCodec | None) -> Constraint | None:
    """Of flags that were checked. codec: where it is at hand, a marker that is spelled by control tokens is taken for these."""
    from stepgraph.sampling.grammar import Constraint

    found: Constraint | None = None
    if options.schema is not None:
        found = Constraint.json_schema(options.schema)
    elif options.regex is not None:
        found = Constraint.regex(options.regex)
    elif options.grammar is not None:
        found = Constraint.ebnf(options.grammar) if options.grammar_kind == "ebnf" else Constraint.lark(options.grammar)
    elif options.choice is not None:
        found = Constraint.choice(options.choice)
    elif options.json_object:
        found = Constraint.json_object()
    if found is None or options.after is None:
        return found
    ids = codec.encode(options.after, begins=False) if codec else []
    controls = codec.vocabulary.non_text_ids if codec else frozenset()
    return found.after(ids if not controls.isdisjoint(ids) else options.after)


def stop_ids(options: argparse.Namespace) -> dict[str, Any]:
    """For SamplingParams."""
    return {} if options.stop is None else {"stop_token_ids": tuple(token_ids("--stop", options.stop))}


def sampling_of(options: argparse.Namespace, stops: dict[str, Any]) -> SamplingParams:
    """Greedy, unless a temperature asks for more."""
    from stepgraph.sampling.params import SamplingParams

    given: dict[str, Any] = {name: getattr(options, name) for name in SAMPLING if getattr(options, name) is not None}
    try:
        return SamplingParams(**{"temperature": 0.0, **given, **stops})
    except ValueError as error:
        field, told = str(error).removeprefix("SamplingParams.").split(":", 1)
        raise ValueError(f"--{field.split('[')[0].replace('_', '-').replace('stop-token-ids', 'stop')}:{told}") from None
