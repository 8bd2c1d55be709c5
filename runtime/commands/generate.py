"""`stepgraph generate`: one streamed answer of a model from a folder or a GGUF file."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

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
    from stepgraph.runtime.engine import Engine
    from stepgraph.runtime.request import Job
    from stepgraph.runtime.text import TextCodec, TextStream
    from stepgraph.sampling.grammar import Constraint, Vocabulary
    from stepgraph.sampling.params import SamplingParams

SUMMARY = "answer a prompt with a model from a folder or a GGUF file, under a schema, pattern or grammar"


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Answer one prompt and print the text while it is generated.\n"
        "Exit code 1: the answer failed, or --max-new-tokens cut it short of its constraint.",
        [
            'stepgraph generate model "Is water wet?" --choice yes --choice no',
            """stepgraph generate model "Is water wet?" --json --schema"""
            """ '{"type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"]}'""",
            'echo "Once upon a time" | stepgraph generate model - --no-chat --draft ngram -k 4 --temperature 0.8 --seed 1',
        ],
    )
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder, or a .gguf file")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("prompt", metavar="PROMPT", nargs="?", help="the prompt; - reads it from standard input")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file")
    prompt.add_argument("--token-ids", metavar="IDS", help="the prompt as token ids, such as 1,2,3; needs no tokenizer library")
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction, help="use the chat template (default: if the model has one)")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt, in a chat")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="maximum length of the answer (default: 256)")
    flags.add_draft_flags(parser)
    flags.add_constraint_flags(parser)
    flags.add_sampling_flags(parser)
    flags.add_dtype_flag(parser)
    flags.add_threads_flag(parser)
    add_json_flag(parser)


@dataclass(frozen=True)
class Request:
    """The checked flags, before the weights are loaded."""

    prompt_ids: list[int]
    constraint: Constraint | None
    sampling: SamplingParams


@dataclass(frozen=True)
class Answer:
    job: Job
    text: str
    seconds: float  # since the submit
    first: float  # seconds until the first token

    @property
    def failure(self) -> str:
        """Empty for a successful answer."""
        if self.job.finish_reason == "length" and self.job.constraint is not None:
            return f"cut short by --max-new-tokens {self.job.max_new_tokens}: the text is not complete"
        if self.job.finish_reason in ("error", "dead_end"):
            return f"{self.job.finish_reason}: {self.job.error or 'no token is allowed'}"
        return ""


def run(options: argparse.Namespace) -> int:
    request = _read_request(options)
    from stepgraph.runtime.text import TextStream

    flags.set_threads(options)
    engine, vocabulary = _make_engine(options, request)
    with engine:
        report = engine.capture(progress=shows_progress())
        if request.constraint is not None:
            engine.compile(request.constraint)  # bad input if it cannot be enforced; not part of the measured time
        answer = _generate(engine, request, options, TextStream(vocabulary))
        if options.json:
            print_json(_document(answer, engine, report.notes))
    if answer.failure:
        print_error(f"stepgraph generate: {answer.failure}")
    elif shows_progress():
        print_error(_summary(answer))
    return FAILED if answer.failure else 0


def _read_request(options: argparse.Namespace) -> Request:
    """Check flags, files and texts before the weights are read."""
    flags.check_constraint_flags(options)
    flags.check_range(options, "max-new-tokens", 1)
    stops = flags.stop_ids(options)
    load_libraries()
    if options.token_ids is not None:
        if options.chat or options.system is not None:
            raise ValueError("--token-ids: got it with --chat or --system, expected it alone: token ids are used unchanged")
        ids = flags.token_ids("--token-ids", options.token_ids)
        return Request(ids, flags.constraint_of(options, None), flags.sampling_of(options, stops))
    text = _prompt(options)
    from stepgraph.runtime.text import TextCodec

    sampling = flags.sampling_of(options, stops)
    with waiting("opening the model ..."):
        codec = TextCodec.open(options.model)
    ids = _encode(options, text, codec)
    if not ids:
        raise ValueError(f"PROMPT: got {clip_repr(text)}, which has no tokens, expected at least one")
    return Request(ids, flags.constraint_of(options, codec), sampling)


def _prompt(options: argparse.Namespace) -> str:
    if options.prompt_file is not None:
        return flags.read_file("--prompt-file", options.prompt_file, "the path of a text file")
    if options.prompt is None:
        raise ValueError("PROMPT: got none, expected a text, - for standard input, --prompt-file or --token-ids")
    return flags.read_standard_input("PROMPT") if options.prompt == "-" else str(options.prompt)


def _encode(options: argparse.Namespace, text: str, codec: TextCodec) -> list[int]:
    chat = codec.has_chat if options.chat is None else options.chat
    if not chat:
        if options.system is not None:
            raise ValueError(f"--system: got {clip_repr(options.system)} for a plain prompt, expected a model with a chat template")
        return codec.encode(text)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return codec.chat([*system, {"role": "user", "content": text}])


def _make_engine(options: argparse.Namespace, request: Request) -> tuple[Engine, Vocabulary]:
    from stepgraph.runtime.config import EngineConfig
    from stepgraph.runtime.engine import Engine
    from stepgraph.runtime.models.files.loading import load_models

    config = EngineConfig(
        max_rows=1,
        num_speculative_tokens=options.drafts,
        max_length=len(request.prompt_ids) + options.max_new_tokens,
        greedy_only=request.sampling.plain,
        **flags.look_up_of(options),
    )
    try:
        with waiting("opening the model ..."):
            loaded = load_models(options.model, options.draft, config, dtype=flags.dtype_of(options), progress=shows_progress())
    except ValueError as error:
        if "max_length" not in str(error):
            raise
        got = f"got {options.max_new_tokens} after a prompt of {len(request.prompt_ids)} tokens"
        raise ValueError(f"--max-new-tokens: {got}: {error}") from None
    flags.set_default_threads(options, loaded.target)
    return Engine(loaded.target, loaded.draft, vocabulary=loaded.vocabulary, config=loaded.config), loaded.vocabulary


def _generate(engine: Engine, request: Request, options: argparse.Namespace, stream: TextStream) -> Answer:
    started, first, pieces = time.perf_counter(), 0.0, []
    job = engine.submit(request.prompt_ids, constraint=request.constraint, sampling=request.sampling, max_new_tokens=options.max_new_tokens)
    for event in engine.stream():
        first = first or time.perf_counter() - started
        pieces.append(stream.push(event.tokens) + (stream.finish() if event.finish_reason else ""))
        if not options.json:
            print_text(pieces[-1], end="")
    if not options.json:
        print_text("")
    return Answer(job, "".join(pieces), time.perf_counter() - started, first)


def _document(answer: Answer, engine: Engine, notes: tuple[str, ...]) -> dict[str, Any]:
    import torch

    job = answer.job
    return {
        "text": answer.text,
        "token_ids": job.tokens,
        "finish_reason": str(job.finish_reason),
        "error": answer.failure,
        "prompt_tokens": len(job.prompt_ids),
        "tokens": len(job.tokens),
        "rounds": job.rounds,
        "tokens_per_round": len(job.tokens) / max(job.rounds, 1),
        "seconds": answer.seconds,
        "seconds_to_first_token": answer.first,
        "tokens_per_second": len(job.tokens) / answer.seconds,
        "seed": job.seed,
        "threads": torch.get_num_threads(),
        "notes": notes,
        "stats": asdict(engine.stats()),
    }


def _summary(answer: Answer) -> str:
    job = answer.job
    speed = f"{len(job.tokens) / answer.seconds:.1f} tokens/s, the first after {answer.first:.2f} s"
    return f"{len(job.tokens)} tokens in {job.rounds} rounds, {speed}, {job.finish_reason}"
