"""`stepgraph capture-check`: whether a user's own step can be captured, and if not, which line of it cannot."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepgraph.runtime.commands.terminal import BAD_INPUT, FAILED, describe, load_libraries, print_json
from stepgraph.sampling.fields import clip_repr

if TYPE_CHECKING:
    from stepgraph.graphs.buffers import StaticBuffers
    from stepgraph.graphs.capture import Recorded, Step

SUMMARY = "is a step of yours capturable? names the line that is not"
WANTED = "a module and a name in it, such as my_step:make"
MAKES = "a function without arguments that returns (step, buffers); for a step itself give --buffers"
MOST_FRAMES = 5  # of a user's that are shown, the innermost
EXAMPLE = """
# my_step.py
import torch
from stepgraph.graphs import BufferSpec, StaticBuffers

buffers = StaticBuffers([BufferSpec("x", (4,), torch.float32), BufferSpec("y", (4,), torch.float32)])

def step(buffers):
    buffers.y.copy_(torch.softmax(buffers.x * 2, 0))

def make():
    return step, buffers
"""


class UserError(Exception):
    """The user's own code raised; the cause is chained."""


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Record a step twice, on the tape or, where its buffers are on a GPU, into a CUDA graph, and compare the recordings:\n"
        "what reads host state, waits for the device or has shapes of its own is refused with rule, file and line.\n"
        "MODULE:NAME is called without arguments and returns (step, buffers); modules of this folder are found.\n" + EXAMPLE,
        [
            "stepgraph capture-check my_step:make",
            "stepgraph capture-check my_step:make --replay --json",
            "stepgraph capture-check my_step:step --buffers my_step:buffers",
        ],
    )
    parser.add_argument("target", metavar="MODULE:NAME", help="what returns (step, buffers); with --buffers, the step itself")
    parser.add_argument("--buffers", metavar="MODULE:NAME", help="its StaticBuffers, or a function that returns them")
    parser.add_argument("--between", metavar="MODULE:NAME", help="called between the two recordings, to change what must not matter")
    parser.add_argument("--replay", action="store_true", help="then run and replay the step from the same state, and compare bit by bit")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def run(options: argparse.Namespace) -> int:
    load_libraries("stepgraph.graphs.capture")
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is no part of the answer
        document, text, code = _checked(options)
    if options.json:
        print_json(document)
    else:
        print(text, file=sys.stderr if code else sys.stdout)
    return code


def _checked(options: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    """What --json prints, what is printed otherwise, and the exit code."""
    from stepgraph.graphs.backends import capture
    from stepgraph.graphs.capture import CaptureError

    sys.path.insert(0, str(Path.cwd()))
    try:
        step, buffers = _step_and_buffers(options)
        between = None if options.between is None else _named("--between", options.between)
        if between is not None:
            _require_callable("--between", options.between, between, "a function without arguments")
    except UserError as error:
        return {"capturable": None, "error": _trace(error.__cause__)}, f"{error}:\n{_trace(error.__cause__)}", BAD_INPUT
    try:
        recorded = capture(step, buffers, check="twice", between=between)
        same = _replays(step, buffers, recorded) if options.replay else None
    except CaptureError as error:
        found = {"rule": error.rule, "message": str(error).split("\n")[0], "file": error.file, "line": error.line, "source": error.source}
        return {"capturable": False, **found}, f"not capturable: {error}", FAILED
    except (Exception, SystemExit) as error:  # whatever a user's step raises
        return {"capturable": False, "error": _trace(error)}, f"the step failed:\n{_trace(error)}", FAILED
    report = recorded.report
    document = {
        "capturable": True,
        "where": str(buffers.device),
        "nodes": dict(report.nodes),
        "host_nodes": list(report.host_nodes),
        "intermediate_bytes": report.nbytes,
        "buffer_bytes": buffers.nbytes,
        "seconds": report.seconds,
        "replay_equals_eager": same,
    }
    return document, _table(document), FAILED if same is False else 0


def _step_and_buffers(options: argparse.Namespace) -> tuple[Step, StaticBuffers]:
    from stepgraph.graphs.buffers import StaticBuffers

    named = _named("MODULE:NAME", options.target)
    if options.buffers is None:
        made = _called("MODULE:NAME", options.target, named, MAKES)
        if not isinstance(made, tuple) or len(made) != 2:
            raise ValueError(f"{options.target}: got {type(made).__name__} from it, want {MAKES}")
        step, buffers = made
    else:
        step, buffers = named, _named("--buffers", options.buffers)
        if not isinstance(buffers, StaticBuffers):
            buffers = _called("--buffers", options.buffers, buffers, "StaticBuffers, or a function without arguments that returns them")
    if not callable(step):
        raise ValueError(f"{options.target}: got {type(step).__name__} for the step, want a function of the buffers")
    if not isinstance(buffers, StaticBuffers):
        raise ValueError(f"{options.buffers or options.target}: got {type(buffers).__name__} for the buffers, want StaticBuffers")
    return step, buffers


def _named(flag: str, given: str) -> Any:
    module, _, name = given.partition(":")
    if not module or not name or module.startswith(".") or module.endswith(".py"):
        raise ValueError(f"{flag}: got {clip_repr(given)}, want {WANTED}")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            raise ValueError(f"{flag}: got {clip_repr(given)}, want {WANTED}; there is no module {error.name!r}") from None
        raise UserError(f"importing {module} failed") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"importing {module} failed") from error
    if not hasattr(imported, name):
        raise ValueError(f"{flag}: got {clip_repr(given)}, want {WANTED}; {module} has no {name!r}")
    return getattr(imported, name)


def _called(flag: str, given: str, function: Any, wanted: str) -> Any:
    _require_callable(flag, given, function, wanted)
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise UserError(f"{given}() failed") from error


def _require_callable(flag: str, given: str, function: Any, wanted: str) -> None:
    if not callable(function):
        raise ValueError(f"{flag}: got {clip_repr(given)}, which is a {type(function).__name__}, want {wanted}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"{flag}: got {clip_repr(given)} ({error}), want {wanted}") from None
    except ValueError:  # some of C's have no signature
        return


def _replays(step: Step, buffers: StaticBuffers, recorded: Recorded) -> bool:
    """Whether a replay leaves the same bits as the step itself, from the state that the buffers are in."""
    from stepgraph.graphs.capture import run_eager
    from stepgraph.graphs.tape.replay_ops import same_bits

    def after(act: Callable[[], None]) -> dict[str, Any]:
        for name, tensor in before.items():
            buffers[name].copy_(tensor)
        act()
        return {name: buffers[name].clone() for name in before}

    before = {name: buffers[name].clone() for name in buffers}
    eager = after(lambda: run_eager(step, buffers))
    return all(same_bits(tensor, eager[name]) for name, tensor in after(recorded.replay).items())


def _trace(error: BaseException | None) -> str:
    """The user's own frames: what is above them is this command."""
    assert error is not None
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(Path.cwd()) and "site-packages" not in frame.filename]
    shown_frames = own[-MOST_FRAMES:] or [frame for frame in frames[-1:] if frame.line]
    lines = [f"  {frame.filename}:{frame.lineno}\n    {frame.line}" for frame in shown_frames]
    return "\n".join([*lines, *(line.rstrip() for line in traceback.format_exception_only(error))])


def _table(document: dict[str, Any]) -> str:
    nodes = ", ".join(f"{count} {kind}" for kind, count in document["nodes"].items())
    lines = [f"capturable on {document['where']}: {nodes or 'no nodes'}"]
    lines += [f"host nodes: {', '.join(document['host_nodes'])}"] if document["host_nodes"] else []
    lines += [f"{document['intermediate_bytes']:,} bytes of intermediates, {document['buffer_bytes']:,} of buffers"]
    if document["replay_equals_eager"] is not None:
        lines += ["a replay equals the step, bit for bit" if document["replay_equals_eager"] else "A REPLAY DIFFERS FROM THE STEP"]
    return "\n".join(lines)
