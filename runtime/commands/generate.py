"""`stepgraph generate`: one answer of a model from a folder or a GGUF file, as it comes."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from stepgraph.runtime.commands.inputs import THREADS, read_file, read_standard_input, set_threads, settle_threads, token_ids
from stepgraph.runtime.commands.request import (
    DTYPES,
    add_constraint_flags,
    add_draft_flags,
    add_sampling_flags,
    check_constraint_flags,
    constraint_of,
    dtype_of,
    look_up_of,
    sampling_of,
    stop_ids,
)
from stepgraph.runtime.commands.terminal import FAILED, describe, load_libraries, print_json, shows_progress, waiting
from stepgraph.sampling.fields import clip_repr

if TYPE_CHECKING:
    from stepgraph.runtime.engine import Engine
    from stepgraph.runtime.request import Job
    from stepgraph.runtime.text import TextCodec, TextStream
    from stepgraph.sampling.grammar import Constraint, Vocabulary
    from stepgraph.sampling.params import SamplingParams

SUMMARY = "answer a prompt with a model from a folder or a GGUF file, under a schema, pattern or grammar"


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Answer one prompt and print the text as it comes.\n"
        "Exit code 1: the answer failed, or it had to obey something and was cut short by --max-new-tokens.",
        [
            'stepgraph generate model "Is water wet?" --choice yes --choice no',
            """stepgraph generate model "Is water wet?" --json --schema"""
            """ '{"type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"]}'""",
            'echo "Once upon a time" | stepgraph generate model - --no-chat --draft ngram -k 4 --temperature 0.8 --seed 1',
        ],
    )
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder, or a .gguf file")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("prompt", metavar="PROMPT", nargs="?", help="what to answer; - reads it from standard input")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read it from a file")
    prompt.add_argument("--token-ids", metavar="IDS", help="give it as token ids, such as 1,2,3; needs no tokenizer library")
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction, help="in the model's chat form (default: where it has one)")
    parser.add_argument("--system", metavar="TEXT", help="a system message in front of a chat")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="the longest answer (default: 256)")
    add_draft_flags(parser)
    add_constraint_flags(parser)
    add_sampling_flags(parser)
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and cache (default: the model's own)")
    parser.add_argument("--threads", type=int, metavar="N", help=THREADS)
    parser.add_argument("--json", action="store_true", help="print one JSON document at the end and nothing else")


@dataclass(frozen=True)
class Asked:
    """What the flags say, before a model takes any memory."""

    prompt_ids: list[int]
    constraint: Constraint | None
    sampling: SamplingParams


@dataclass(frozen=True)
class Told:
    """One answer and what it took."""

    job: Job
    text: str
    seconds: float  # from the submit on
    first: float  # until the first token

    @property
    def failed(self) -> str:
        """Why it is not what was asked for; empty where it is."""
        if self.job.finish_reason == "length" and self.job.constraint is not None:
            return f"cut short by --max-new-tokens {self.job.max_new_tokens}: the text is not complete"
        if self.job.finish_reason in ("error", "dead_end"):
            return f"{self.job.finish_reason}: {self.job.error or 'nothing may follow'}"
        return ""


def run(options: argparse.Namespace) -> int:
    asked = _asked(options)
    from stepgraph.runtime.text import TextStream

    set_threads(options.threads)
    engine, vocabulary = _engine(options, asked)
    with engine:
        report = engine.capture(progress=shows_progress())
        if asked.constraint is not None:
            engine.compile(asked.constraint)  # what cannot be enforced is bad input, and no part of the answer's time
        told = _answer(engine, asked, options, TextStream(vocabulary))
        if options.json:
            print_json(_document(told, engine, report.notes))
    if told.failed:
        print(f"stepgraph generate: {told.failed}", file=sys.stderr)
    elif shows_progress():
        print(_summary(told), file=sys.stderr)
    return FAILED if told.failed else 0


def _asked(options: argparse.Namespace) -> Asked:
    """What flags, files and texts get wrong is found before weights are read."""
    check_constraint_flags(options)
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens: got {options.max_new_tokens}, want at least 1")
    stops = stop_ids(options)
    load_libraries()
    if options.token_ids is not None:
        if options.chat or options.system is not None:
            raise ValueError("--token-ids: got it beside --chat or --system, want it alone: ids are taken as they are")
        ids = token_ids("--token-ids", options.token_ids)
        return Asked(ids, constraint_of(options, None), sampling_of(options, stops))
    text = _prompt(options)
    from stepgraph.runtime.text import TextCodec

    sampling = sampling_of(options, stops)
    with waiting("opening the model ..."):
        codec = TextCodec.open(options.model)
    ids = _ids(options, text, codec)
    if not ids:
        raise ValueError(f"PROMPT: got {clip_repr(text)}, which has no tokens, want at least one")
    return Asked(ids, constraint_of(options, codec), sampling)


def _prompt(options: argparse.Namespace) -> str:
    if options.prompt_file is not None:
        return read_file("--prompt-file", options.prompt_file, "the path of a text")
    if options.prompt is None:
        raise ValueError("PROMPT: got none, want a text, - for standard input, --prompt-file or --token-ids")
    return read_standard_input("PROMPT") if options.prompt == "-" else str(options.prompt)


def _ids(options: argparse.Namespace, text: str, codec: TextCodec) -> list[int]:
    chat = codec.has_chat if options.chat is None else options.chat
    if not chat:
        if options.system is not None:
            raise ValueError(f"--system: got {clip_repr(options.system)} for a plain prompt, want a model with a chat template")
        return codec.encode(text)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return codec.chat([*system, {"role": "user", "content": text}])


def _engine(options: argparse.Namespace, asked: Asked) -> tuple[Engine, Vocabulary]:
    from stepgraph.runtime.config import EngineConfig
    from stepgraph.runtime.engine import Engine
    from stepgraph.runtime.models.files.loading import load_models

    config = EngineConfig(
        max_rows=1,
        num_speculative_tokens=options.drafts,
        max_length=len(asked.prompt_ids) + options.max_new_tokens,
        greedy_only=asked.sampling.plain,
        **look_up_of(options),
    )
    try:
        with waiting("opening the model ..."):
            loaded = load_models(options.model, options.draft, config, dtype=dtype_of(options), progress=shows_progress())
    except ValueError as error:
        if "max_length" not in str(error):
            raise
        got = f"got {options.max_new_tokens} behind {len(asked.prompt_ids)} tokens of prompt"
        raise ValueError(f"--max-new-tokens: {got}: {error}") from None
    settle_threads(options.threads, loaded.target)
    return Engine(loaded.target, loaded.draft, vocabulary=loaded.vocabulary, config=loaded.config), loaded.vocabulary


def _answer(engine: Engine, asked: Asked, options: argparse.Namespace, stream: TextStream) -> Told:
    started, first, pieces = time.perf_counter(), 0.0, []
    job = engine.submit(asked.prompt_ids, constraint=asked.constraint, sampling=asked.sampling, max_new_tokens=options.max_new_tokens)
    for event in engine.stream():
        first = first or time.perf_counter() - started
        pieces.append(stream.push(event.tokens) + (stream.finish() if event.finish_reason else ""))
        if not options.json:
            print(pieces[-1], end="", flush=True)
    if not options.json:
        print()
    return Told(job, "".join(pieces), time.perf_counter() - started, first)


def _document(told: Told, engine: Engine, notes: tuple[str, ...]) -> dict[str, Any]:
    import torch

    job = told.job
    return {
        "text": told.text,
        "token_ids": job.tokens,
        "finish_reason": str(job.finish_reason),
        "error": told.failed,
        "prompt_tokens": len(job.prompt_ids),
        "tokens": len(job.tokens),
        "rounds": job.rounds,
        "tokens_per_round": len(job.tokens) / max(job.rounds, 1),
        "seconds": told.seconds,
        "seconds_to_first_token": told.first,
        "tokens_per_second": len(job.tokens) / told.seconds,
        "seed": job.seed,
        "threads": torch.get_num_threads(),
        "notes": notes,
        "stats": asdict(engine.stats()),
    }


def _summary(told: Told) -> str:
    job = told.job
    speed = f"{len(job.tokens) / told.seconds:.1f} tokens/s, the first after {told.first:.2f} s"
    return f"{len(job.tokens)} tokens in {job.rounds} rounds, {speed}, {job.finish_reason}"
