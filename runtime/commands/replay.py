"""`stepgraph replay`: ask again what a recorded engine was asked, and compare the answers token for token."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from stepgraph.runtime.commands.inputs import set_threads
from stepgraph.runtime.commands.request import DTYPES, dtype_of
from stepgraph.runtime.commands.terminal import FAILED, describe, load_libraries, print_json, shows_progress

if TYPE_CHECKING:
    from stepgraph.runtime.extras.replay import RecordedRun, ReplayReport

SUMMARY = "ask again what an engine with record=FILE was asked, and compare token for token"


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Ask the same model the same at the same steps, and compare what it says. Grammars are ready when they are wanted, so requests\n"
        "may sit down sooner than they did; that changes rounds, never tokens. A cancelled text is compared as far as both go.\n"
        "Exit code 1: something is different. 2: FILE is no recording, or one of another model.",
        ["stepgraph replay toy.jsonl --toy", "stepgraph replay run.jsonl --model model --draft ngram --json"],
    )
    parser.add_argument("file", metavar="FILE", help="what Engine(record=FILE) wrote")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="MODEL", help="the model that was recorded: a Hugging Face folder, or a .gguf file")
    model.add_argument("--toy", action="store_true", help="the toy pair of `stepgraph bench toy`")
    words = "its draft: auto, ngram, forced, mtp, none, or a folder (default: auto)"
    parser.add_argument("--draft", metavar="WORD|FOLDER", help=words)
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and cache (default: the model's own)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of torch (default: its own choice)")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def run(options: argparse.Namespace) -> int:
    if options.toy and options.draft is not None:
        raise ValueError(f"--draft: got {options.draft} beside --toy, want it beside --model: the toy pair has its own")
    load_libraries()
    from stepgraph.runtime.extras.replay import read_recording, version_differences

    recorded = read_recording(options.file)
    set_threads(options.threads)
    found = _replayed(recorded, options)
    if options.json:
        print_json(_document(recorded, found))
    else:
        _print(recorded, found)
    for told in version_differences(recorded) if found.differences and not options.json else ():
        print(f"stepgraph replay: {told}", file=sys.stderr)
    return 0 if found.equal else FAILED


def _replayed(recorded: RecordedRun, options: argparse.Namespace) -> ReplayReport:
    from stepgraph.runtime.extras.replay import replay

    progress = shows_progress() and not options.json
    if options.toy:
        from stepgraph.runtime.demo.variants import toy_pair

        pair = toy_pair()
        return replay(recorded, pair.target, pair.draft, pair.vocabulary, progress=progress)
    from stepgraph.runtime.models.files.loading import load_models

    loaded = load_models(options.model, options.draft or "auto", recorded.config, dtype=dtype_of(options), progress=progress)
    draft = "none" if loaded.draft is None else loaded.draft
    return replay(recorded, loaded.target, draft, loaded.vocabulary, progress=progress)


def _document(recorded: RecordedRun, found: ReplayReport) -> dict[str, Any]:
    from stepgraph.runtime.extras.replay import version_differences

    return {
        "equal": found.equal,
        "requests": found.requests,
        "left_out": found.skipped,
        "tokens": found.tokens,
        "recorded_tokens": found.recorded_tokens,
        "rounds": found.rounds,
        "recorded_steps": recorded.steps,
        "ending": recorded.ending,
        "differences": [difference._asdict() for difference in found.differences],
        "other_versions": version_differences(recorded),
    }


def _print(recorded: RecordedRun, found: ReplayReport) -> None:
    print(f"{found.requests} requests, {found.tokens} of {found.recorded_tokens} tokens compared; the recording ends: {recorded.ending}")
    if found.skipped:
        print(f"{found.skipped} requests with embeddings were left out: a recording has none of them")
    print("equal" if found.equal else f"different: {len(found.differences)} requests; first {found.differences[0]}")
