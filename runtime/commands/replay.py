"""`stepgraph replay`: submit the requests of a recording again and compare the answers token by token."""

from __future__ import annotations

import argparse
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
)

if TYPE_CHECKING:
    from stepgraph.runtime.extras.replay import RecordedRun, ReplayReport

SUMMARY = "submit the requests of a recording (record=FILE) again and compare the answers token by token"


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Submit the recorded requests to the same model at the same steps and compare the answers. Grammars are compiled in\n"
        "advance, so requests may start earlier than they did; that changes rounds, never tokens. The text of a cancelled request\n"
        "is compared up to the length of the shorter one. Exit code 1: an answer differs. 2: FILE is not a recording, or is one of\n"
        "another model.",
        ["stepgraph replay toy.jsonl --toy", "stepgraph replay run.jsonl --model model --draft ngram --json"],
    )
    parser.add_argument("file", metavar="FILE", help="a recording written by Engine(record=FILE)")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="MODEL", help="the recorded model: a Hugging Face folder, or a .gguf file")
    model.add_argument("--toy", action="store_true", help="the toy pair of `stepgraph bench toy`")
    words = "its draft: auto, ngram, forced, mtp, none, or a folder (default: auto)"
    parser.add_argument("--draft", metavar="WORD|FOLDER", help=words)
    flags.add_dtype_flag(parser)
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of torch (default: torch's default)")
    add_json_flag(parser)


def run(options: argparse.Namespace) -> int:
    if options.toy and options.draft is not None:
        raise ValueError(f"--draft: got {options.draft} with --toy, expected it with --model: the toy pair has its own draft")
    load_libraries()
    from stepgraph.runtime.extras.replay import read_recording, version_differences

    recorded = read_recording(options.file)
    flags.set_threads(options)
    replayed = _replay(recorded, options)
    if options.json:
        print_json(_document(recorded, replayed))
    else:
        _print(recorded, replayed)
        for note in version_differences(recorded) if replayed.differences else ():
            print_error(f"stepgraph replay: {note}")
    return 0 if replayed.equal else FAILED


def _replay(recorded: RecordedRun, options: argparse.Namespace) -> ReplayReport:
    from stepgraph.runtime.extras.replay import replay

    progress = shows_progress() and not options.json
    if options.toy:
        from stepgraph.runtime.demo.variants import toy_pair

        pair = toy_pair()
        return replay(recorded, pair.target, pair.draft, pair.vocabulary, progress=progress)
    from stepgraph.runtime.models.files.loading import load_models

    loaded = load_models(options.model, options.draft or "auto", recorded.config, dtype=flags.dtype_of(options), progress=progress)
    draft = "none" if loaded.draft is None else loaded.draft
    return replay(recorded, loaded.target, draft, loaded.vocabulary, progress=progress)


def _document(recorded: RecordedRun, replayed: ReplayReport) -> dict[str, Any]:
    from stepgraph.runtime.extras.replay import version_differences

    return {
        "equal": replayed.equal,
        "requests": replayed.requests,
        "left_out": replayed.skipped,
        "tokens": replayed.tokens,
        "recorded_tokens": replayed.recorded_tokens,
        "rounds": replayed.rounds,
        "recorded_steps": recorded.steps,
        "ending": recorded.ending,
        "differences": [difference._asdict() for difference in replayed.differences],
        "other_versions": version_differences(recorded),
    }


def _print(recorded: RecordedRun, replayed: ReplayReport) -> None:
    compared = f"{replayed.tokens} of {replayed.recorded_tokens} tokens compared"
    print_text(f"{replayed.requests} requests, {compared}; end of the recording: {recorded.ending}")
    if replayed.skipped:
        print_text(f"{replayed.skipped} requests with prompt embeddings were skipped: a recording does not contain embeddings")
    differences = replayed.differences
    print_text("equal" if replayed.equal else f"different: {len(differences)} requests; first {differences[0]}")
