"""`stepgraph generate`: one streamed answer of a model from a folder or a GGUF file."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from stepgraph.runtime.commands import engines, terminal
from stepgraph.runtime.commands.flags import SAMPLING_FLAGS
from stepgraph.runtime.commands.inputs import read_file, read_standard_input
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.engine import Engine
from stepgraph.runtime.request import Job
from stepgraph.runtime.text import TextCodec
from stepgraph.sampling.fields import clip_repr
from stepgraph.sampling.grammar import Constraint
from stepgraph.sampling.grammar.compile.backends import check_constraints
from stepgraph.sampling.params import SamplingParams


class Request(NamedTuple):
    """The checked flags, before the weights are loaded."""

    prompt_ids: list[int]
    constraint: Constraint | None
    sampling: SamplingParams


def run(options: argparse.Namespace) -> int:
    request = _read_request(options)
    engines.set_threads(options)
    engine = _make_engine(options, request)
    with engine:
        engine.ensure_captured(progress=terminal.shows_progress())
        if request.constraint is not None:
            engine.compile(request.constraint)  # ValueError if it cannot be enforced; not part of the measured time
        document = _generate(engine, request, options)
        document |= {"threads": torch.get_num_threads(), "notes": engine.notes, "stats": asdict(engine.stats())}
    if options.json:
        terminal.print_json(document)
    if not document["error"] and terminal.shows_progress():
        print(_summary(document), file=sys.stderr)
    return terminal.report_failures("generate", filter(None, [document["error"]]))


def _summary(document: dict[str, Any]) -> str:
    """One line, with the colours of the text as a legend."""
    colour = terminal.colour_enabled(sys.stdout) and terminal.colour_enabled(sys.stderr)
    counts = {origin: document["origins"].count(origin) for origin in terminal.ORIGINS}
    parts = [(f"{count} {terminal.ORIGINS[origin]}", origin) for origin, count in counts.items() if count]
    origins = ", ".join(terminal.coloured(text, origin) if colour else text for text, origin in parts)
    speed = f"{document['tokens_per_second']:.1f} tokens/s, the first after {document['seconds_to_first_token']:.2f} s"
    return f"{document['tokens']} tokens in {document['rounds']} rounds ({origins}), {speed}, {document['finish_reason']}"


def _read_request(options: argparse.Namespace) -> Request:
    """Check the constraint before the tokenizer is read, and the prompt before the weights are read."""
    if constraint := constraint_of(options, None):
        with terminal.waiting("checking the constraint ..."):
            check_constraints([constraint])
    if options.token_ids is not None:
        marker_codec = None if options.after is None else TextCodec.open(options.model)
        return Request(options.token_ids, constraint_of(options, marker_codec), _sampling_of(options))
    text, sampling = _prompt(options), _sampling_of(options)
    with terminal.waiting("opening the model ..."):
        codec = TextCodec.open(options.model)
    ids = _encode(options, text, codec)
    if not ids:
        raise ValueError(f"PROMPT: got {clip_repr(text)}, which has no tokens, expected at least one")
    return Request(ids, constraint_of(options, codec), sampling)


def _prompt(options: argparse.Namespace) -> str:
    if options.prompt_file is not None:
        return read_file("--prompt-file", options.prompt_file, "the path of a text file")
    if options.prompt is None:
        raise ValueError("PROMPT: got none, expected a text, - for standard input, --prompt-file or --token-ids")
    return read_standard_input("PROMPT") if options.prompt == "-" else str(options.prompt)


def _encode(options: argparse.Namespace, text: str, codec: TextCodec) -> list[int]:
    chat = codec.has_chat if options.chat is None else options.chat
    if not chat:
        if options.system is not None:
            raise ValueError(f"--system: got {clip_repr(options.system)} for a plain prompt, expected a model with a chat template")
        return codec.encode(text)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return codec.chat([*system, {"role": "user", "content": text}])


def constraint_of(options: argparse.Namespace, codec: TextCodec | None) -> Constraint | None:
    """The constraint of the flags. With a codec, a marker that encodes to control tokens becomes their ids."""
    if options.constraint is None:
        return None
    kind, arguments = options.constraint
    constraint: Constraint = getattr(Constraint, kind)(*arguments)
    if options.after is None:
        return constraint
    ids = codec.encode(options.after, begins=False) if codec else []
    control_ids = codec.vocabulary.non_text_ids if codec else frozenset()
    return constraint.after(options.after if control_ids.isdisjoint(ids) else ids)


def _sampling_of(options: argparse.Namespace) -> SamplingParams:
    values: dict[str, Any] = {name: getattr(options, name) for name in SAMPLING_FLAGS if getattr(options, name) is not None}
    values |= {name: tuple(getattr(options, name)) for name in ("stop", "stop_token_ids") if getattr(options, name) is not None}
    return SamplingParams(**values)


def _make_engine(options: argparse.Namespace, request: Request) -> Engine:
    config = EngineConfig(
        max_rows=1,
        num_speculative_tokens=options.drafts,
        draft_length=options.draft_length,
        max_length=len(request.prompt_ids) + options.max_new_tokens,
        greedy_only=request.sampling.plain,
        look_up=options.look_up,
        grammar_lane="host" if request.constraint is None else "auto",  # the tables of the vocabulary are not needed
    )
    with terminal.waiting("opening the model ..."):
        loaded = engines.load(options, config, terminal.shows_progress())
    return Engine(loaded.target, loaded.draft, vocabulary=loaded.vocabulary, config=loaded.config)


def _generate(engine: Engine, request: Request, options: argparse.Namespace) -> dict[str, Any]:
    started, first = time.perf_counter(), 0.0
    job = engine.submit(request.prompt_ids, constraint=request.constraint, sampling=request.sampling, max_new_tokens=options.max_new_tokens)
    stream = job.text_stream()
    for event in engine.stream():
        first = first or time.perf_counter() - started
        for token, origin in () if options.json else zip(event.tokens, event.origins, strict=True):
            terminal.print_text(stream.push((token,)), end="", origin=origin.value)
    if not options.json:
        terminal.print_text(stream.finish())
    seconds = time.perf_counter() - started
    return {
        "text": job.text,
        "token_ids": job.tokens,
        "origins": [origin.value for origin in job.origins],
        "finish_reason": str(job.finish_reason),
        "error": _failure_of(job),
        "prompt_tokens": len(job.prompt_ids),
        "tokens": len(job.tokens),
        "rounds": job.rounds,
        "tokens_per_round": len(job.tokens) / max(job.rounds, 1),
        "seconds": seconds,
        "seconds_to_first_token": first,
        "tokens_per_second": len(job.tokens) / seconds,
        "seed": job.seed,
    }


def _failure_of(job: Job) -> str:
    """Why the answer failed; empty if it did not."""
    if job.finish_reason == "length" and job.constraint is not None:
        with contextlib.suppress(ValueError):
            _ = job.parsed  # a text whose end is certain
            return ""
        return f"cut short by --max-new-tokens {job.max_new_tokens}: the end of the text was not reached"
    return engines.failure_of(job)
