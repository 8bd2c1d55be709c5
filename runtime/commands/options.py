"""Flags that several commands share, and the values behind them. ValueErrors have the form `--flag: got VALUE, expected ACCEPTED`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepgraph.sampling.fields import clip_repr

if TYPE_CHECKING:
    import torch

    from stepgraph.runtime.text import TextCodec
    from stepgraph.sampling.grammar import Constraint
    from stepgraph.sampling.params import SamplingParams

SAMPLING = {
    "temperature": (float, "0 always chooses the most likely token (default: 0)"),
    "top_p": (float, "sample from the most likely tokens with this total probability"),
    "top_k": (int, "sample from this many of the most likely tokens"),
    "min_p": (float, "drop tokens less likely than this fraction of the most likely one"),
    "seed": (int, "the same seed gives the same text"),
    "repetition_penalty": (float, "divide the logits of tokens in the prompt or answer by this"),
    "presence_penalty": (float, "subtract this from the logits of tokens in the answer"),
    "frequency_penalty": (float, "subtract this once for each occurrence in the answer"),
    "min_new_tokens": (int, "no stop token before this many tokens"),
}
DTYPES = ("bfloat16", "float16", "float32")
MAX_THREADS = 1024
GRAMMAR_KINDS = {".ebnf": "ebnf", ".gbnf": "ebnf", ".lark": "lark"}  # by file suffix


def add_draft_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafts")
    words = "auto, ngram, forced, mtp, none, or the folder of a draft (default: auto)"
    group.add_argument("--draft", default="auto", metavar="WORD|FOLDER", help=words)
    group.add_argument("-k", "--drafts", type=int, default=4, metavar="N", help="drafts per round, 0 to 8 (default: 4)")
    look_up = "with a draft model: first look for at least N matching tokens in the text and propose what followed them"
    group.add_argument("--look-up", type=int, metavar="N", help=look_up)


def add_dtype_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and cache (default: the model's own)")


def add_threads_flag(parser: argparse.ArgumentParser) -> None:
    default = "OMP_NUM_THREADS; otherwise 1 if layers run in C (see stepgraph doctor), else torch's default"
    parser.add_argument("--threads", type=int, metavar="N", help=f"CPU threads of torch (default: {default})")


def add_constraint_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("constraint (at most one, and --after)")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--schema", metavar="FILE|JSON", help="a JSON schema: a file, or the schema itself")
    one.add_argument("--regex", metavar="PATTERN", help="a regular expression for the whole text")
    one.add_argument("--grammar", metavar="FILE", help="a grammar in GBNF (.ebnf, .gbnf) or Lark (.lark) notation")
    one.add_argument("--choice", metavar="TEXT", action="append", help="one of several texts; repeat the flag for each")
    one.add_argument("--json-object", action="store_true", help="any JSON object")
    kinds = sorted(set(GRAMMAR_KINDS.values()))
    group.add_argument("--grammar-kind", choices=kinds, help="the notation, for files with another suffix")
    group.add_argument("--after", metavar="MARKER", help="apply the constraint only after this text or control token, such as </think>")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, (kind, help_text) in SAMPLING.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper(), help=help_text)
    group.add_argument("--stop", metavar="IDS", help="token ids that end the text in addition to the model's own, such as 2,13")


def check_range(options: argparse.Namespace, flag: str, least: int, most: int | None = None) -> None:
    """flag: without dashes. Raises ValueError if the flag's number is out of range."""
    value = getattr(options, flag.replace("-", "_"))
    if value < least or (most is not None and value > most):
        accepted = f"at least {least}" if most is None else f"a whole number from {least} to {most}"
        raise ValueError(f"--{flag}: got {value}, expected {accepted}")


def dtype_of(options: argparse.Namespace) -> torch.dtype | None:
    import torch

    return getattr(torch, options.dtype) if options.dtype else None


def look_up_of(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments for EngineConfig."""
    return {} if options.look_up is None else {"look_up": options.look_up}


def check_constraint_flags(options: argparse.Namespace) -> None:
    """Check the flags without a model. Reads the files: options.schema and options.grammar then hold their contents."""
    if options.schema is not None:
        options.schema = read_schema("--schema", options.schema)
    if options.grammar is None and options.grammar_kind is not None:
        raise ValueError(f"--grammar-kind: got {options.grammar_kind} without --grammar, expected both")
    if options.grammar is not None:
        options.grammar_kind = options.grammar_kind or GRAMMAR_KINDS.get(options.grammar[options.grammar.rfind(".") :])
        if options.grammar_kind is None:
            accepted = f"a file with the suffix {', '.join(GRAMMAR_KINDS)}, or --grammar-kind"
            raise ValueError(f"--grammar: got {clip_repr(options.grammar)}, expected {accepted}")
        options.grammar = read_file("--grammar", options.grammar, "the path of a grammar")
    constrained = options.json_object or any(getattr(options, name) is not None for name in ("schema", "regex", "grammar", "choice"))
    if options.after is not None and not constrained:
        accepted = "--schema, --regex, --grammar, --choice or --json-object with it"
        raise ValueError(f"--after: got {clip_repr(options.after)} without a constraint, expected {accepted}")


def constraint_of(options: argparse.Namespace, codec: TextCodec | None) -> Constraint | None:
    """After `check_constraint_flags`. With a codec, a marker that encodes to control tokens becomes their ids."""
    from stepgraph.sampling.grammar import Constraint

    constraint: Constraint | None = None
    if options.schema is not None:
        constraint = Constraint.json_schema(options.schema)
    elif options.regex is not None:
        constraint = Constraint.regex(options.regex)
    elif options.grammar is not None:
        constraint = Constraint.ebnf(options.grammar) if options.grammar_kind == "ebnf" else Constraint.lark(options.grammar)
    elif options.choice is not None:
        constraint = Constraint.choice(options.choice)
    elif options.json_object:
        constraint = Constraint.json_object()
    if constraint is None or options.after is None:
        return constraint
    ids = codec.encode(options.after, begins=False) if codec else []
    control_ids = codec.vocabulary.non_text_ids if codec else frozenset()
    return constraint.after(options.after if control_ids.isdisjoint(ids) else ids)


def stop_ids(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments for SamplingParams."""
    return {} if options.stop is None else {"stop_token_ids": tuple(token_ids("--stop", options.stop))}


def sampling_of(options: argparse.Namespace, stops: dict[str, Any]) -> SamplingParams:
    """stops: from `stop_ids`."""
    from stepgraph.sampling.params import SamplingParams

    values: dict[str, Any] = {name: getattr(options, name) for name in SAMPLING if getattr(options, name) is not None}
    try:
        return SamplingParams(**{"temperature": 0.0, **values, **stops})
    except ValueError as error:
        field, message = str(error).removeprefix("SamplingParams.").split(":", 1)
        raise ValueError(f"--{field.split('[')[0].replace('_', '-').replace('stop-token-ids', 'stop')}:{message}") from None


def read_schema(flag: str, value: str) -> dict[str, Any]:
    """A JSON schema from the value itself if it starts with {, else from the file of this path."""
    text = value if value.lstrip().startswith("{") else read_file(flag, value, "a JSON schema: the path of a file, or the schema itself")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{flag}: got {clip_repr(value)}, which is not JSON ({error}), expected a JSON schema") from None
    if not isinstance(schema, dict):
        raise ValueError(f"{flag}: got {clip_repr(value)} with a {type(schema).__name__}, expected an object")
    return schema


def read_file(flag: str, path: str, expected: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # some editors start a file with a byte order mark
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{flag}: got {clip_repr(path)} ({why}), expected {expected}") from None


def read_standard_input(flag: str) -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag}: got bytes that are not UTF-8 ({error}), expected text") from None


def token_ids(flag: str, value: str) -> list[int]:
    """Ids separated by commas or spaces."""
    try:
        return [int(word) for word in value.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"{flag}: got {clip_repr(value)}, expected token ids such as 1,2,3") from None


def set_threads(options: argparse.Namespace) -> None:
    if options.threads is None:
        return
    check_range(options, "threads", 1, MAX_THREADS)  # torch aborts if the system cannot start them
    import torch

    torch.set_num_threads(options.threads)


def set_default_threads(options: argparse.Namespace, model: object) -> None:
    """Without --threads and OMP_NUM_THREADS: one thread for a model whose layers run in C.

    The C kernels use the calling thread only, and with more threads torch computes the matrix products instead of them.
    """
    import torch

    from stepgraph.sampling.kernels.operation import why_no_c

    if options.threads is not None or "OMP_NUM_THREADS" in os.environ or not isinstance(model, torch.nn.Module):
        return
    weight = next((tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()), None)
    if weight is not None and weight.device.type == "cpu" and not why_no_c(weight.dtype):
        torch.set_num_threads(1)
