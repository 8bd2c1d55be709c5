"""`stepgraph replay`: submit the requests of a recording again and compare the answers token by token."""

from __future__ import annotations

import argparse

from stepgraph.runtime.commands import engines, terminal
from stepgraph.runtime.commands.flags import TOY
from stepgraph.runtime.demo.variants import toy_pair
from stepgraph.runtime.replay import RecordedRun, ReplayReport, read_recording, replay, version_differences


def run(options: argparse.Namespace) -> int:
    recorded = read_recording(options.file)
    engines.set_threads(options)
    replayed = _replay(recorded, options)
    if options.json:
        document = vars(replayed) | {"differences": [difference._asdict() for difference in replayed.differences]}
        document |= {"equal": replayed.equal, "recorded_steps": recorded.steps, "ending": recorded.ending}
        terminal.print_json(document | {"other_versions": version_differences(recorded)})
    else:
        _print(recorded, replayed)
        terminal.report_failures("replay", version_differences(recorded) if replayed.differences else ())
    return 0 if replayed.equal else terminal.FAILED


def _replay(recorded: RecordedRun, options: argparse.Namespace) -> ReplayReport:
    progress = terminal.shows_progress() and not options.json
    if options.model == TOY:
        pair = toy_pair()
        return replay(recorded, pair.target, None if options.draft == "none" else pair.draft, pair.vocabulary, progress=progress)
    loaded = engines.load(options, recorded.config, progress)
    draft = "none" if loaded.draft is None else loaded.draft
    return replay(recorded, loaded.target, draft, loaded.vocabulary, progress=progress)


def _print(recorded: RecordedRun, replayed: ReplayReport) -> None:
    compared = f"{replayed.tokens} of {replayed.recorded_tokens} tokens compared"
    terminal.print_text(f"{replayed.requests} requests, {compared}; end of the recording: {recorded.ending}")
    if replayed.skipped:
        terminal.print_text(f"{replayed.skipped} requests with prompt embeddings were skipped: a recording does not contain embeddings")
    differences = replayed.differences
    terminal.print_text("equal" if replayed.equal else f"different: {len(differences)} requests; first {differences[0]}")
