"""`stepgraph capture-check`: whether a user's step can be captured, and if not, which line prevents it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stepgraph.graphs.backends import capture, run_eager
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Recorded, Step
from stepgraph.graphs.errors import CaptureError
from stepgraph.graphs.tape.replay_ops import same_bits
from stepgraph.runtime.commands import terminal
from stepgraph.runtime.printing import print_error
from stepgraph.sampling.fields import callable_with, clip_repr

MODULE_AND_NAME = "a module and a name in it, such as my_step:make"
FACTORY = "a function without arguments that returns (step, buffers); to pass the step itself, use --buffers"
MAX_FRAMES = 5  # innermost frames of the user's code in an error report


class UserError(Exception):
    """The user's own code raised; the cause is chained."""


def run(options: argparse.Namespace) -> int:
    with contextlib.redirect_stdout(sys.stderr):  # output of the user's code does not mix with the result
        document, text, code = _check(options)
    if options.json:
        terminal.print_json(document)
    elif code:
        print_error(text)
    else:
        terminal.print_text(text)
    return code


def _check(options: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    """The output with --json, the output without, and the exit code."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        step, buffers = _step_and_buffers(options)
        between = None if options.between is None else _import("--between", options.between)
        if between is not None:
            _require_callable("--between", options.between, between, "a function without arguments")
    except UserError as error:
        return {"capturable": None, "error": _trace(error.__cause__)}, f"{error}:\n{_trace(error.__cause__)}", terminal.BAD_INPUT
    try:
        recorded = capture(step, buffers, check="twice", between=between)
        same = _replay_equals_eager(step, buffers, recorded) if options.replay else None
    except CaptureError as error:
        where = {"rule": error.rule, "message": str(error).split("\n")[0], "file": error.file, "line": error.line, "source": error.source}
        return {"capturable": False, **where}, f"not capturable: {error}", terminal.FAILED
    except (Exception, SystemExit) as error:  # raised by the user's step
        return {"capturable": False, "error": _trace(error)}, f"the step failed:\n{_trace(error)}", terminal.FAILED
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
    return document, _table(document), terminal.FAILED if same is False else 0


def _step_and_buffers(options: argparse.Namespace) -> tuple[Step, StaticBuffers]:
    target = _import("MODULE:NAME", options.target)
    if options.buffers is None:
        result = _call("MODULE:NAME", options.target, target, FACTORY)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"{options.target}: got {type(result).__name__} as its result, expected {FACTORY}")
        step, buffers = result
    else:
        step, buffers = target, _import("--buffers", options.buffers)
        if not isinstance(buffers, StaticBuffers):
            buffers = _call("--buffers", options.buffers, buffers, "StaticBuffers, or a function without arguments that returns them")
    if not callable_with(None)(step):
        raise ValueError(f"{options.target}: got {clip_repr(step)} as the step, expected a function of one argument, the buffers")
    if not isinstance(buffers, StaticBuffers):
        raise ValueError(f"{options.buffers or options.target}: got {type(buffers).__name__} as the buffers, expected StaticBuffers")
    return step, buffers


def _import(flag: str, value: str) -> Any:
    module, _, name = value.partition(":")
    if not module or not name or module.startswith(".") or module.endswith(".py"):
        raise ValueError(f"{flag}: got {clip_repr(value)}, expected {MODULE_AND_NAME}")
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            raise ValueError(f"{flag}: got {clip_repr(value)}, expected {MODULE_AND_NAME}; there is no module {missing!r}") from None
        raise UserError(f"importing {module} failed") from error
    if not hasattr(imported, name):
        raise ValueError(f"{flag}: got {clip_repr(value)}, expected {MODULE_AND_NAME}; {module} has no {name!r}")
    return getattr(imported, name)


def _call(flag: str, value: str, function: Any, expected: str) -> Any:
    _require_callable(flag, value, function, expected)
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise UserError(f"{value}() failed") from error


def _require_callable(flag: str, value: str, function: Any, expected: str) -> None:
    if not callable(function):
        raise ValueError(f"{flag}: got {clip_repr(value)}, which is a {type(function).__name__}, expected {expected}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"{flag}: got {clip_repr(value)} ({error}), expected {expected}") from None
    except ValueError:  # some functions in C have no signature
        return


def _replay_equals_eager(step: Step, buffers: StaticBuffers, recorded: Recorded) -> bool:
    """Whether a replay and the step leave the same bits, both started from the current contents of the buffers."""

    def after(run: Callable[[], None]) -> dict[str, Any]:
        for name, tensor in before.items():
            buffers[name].copy_(tensor)
        run()
        if buffers.device.type == "cuda":
            torch.cuda.synchronize(buffers.device)  # pinned buffers are read by the host
        return {name: buffers[name].clone() for name in before}

    before = {name: buffers[name].clone() for name in buffers}
    eager = after(lambda: run_eager(step, buffers))
    return all(same_bits(tensor, eager[name]) for name, tensor in after(recorded.replay).items())


def _trace(error: BaseException | None) -> str:
    """The exception with the frames of the user's files; the frames above them belong to this command."""
    assert error is not None
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if Path(frame.filename).is_relative_to(Path.cwd()) and "site-packages" not in frame.filename]
    shown = user_frames[-MAX_FRAMES:] or [frame for frame in frames[-1:] if frame.line]
    lines = [f"  {frame.filename}:{frame.lineno}\n    {frame.line}" for frame in shown]
    return "\n".join([*lines, *(line.rstrip() for line in traceback.format_exception_only(error))])


def _table(document: dict[str, Any]) -> str:
    nodes = ", ".join(f"{count} {kind}" for kind, count in document["nodes"].items())
    lines = [f"capturable on {document['where']}: {nodes or 'no nodes'}"]
    names = ", ".join(document["host_nodes"])
    lines += [f"host nodes: {names}; unchecked: whether they access device buffers, or buffers that they do not declare"] if names else []
    lines += [f"{document['intermediate_bytes']:,} bytes of intermediates, {document['buffer_bytes']:,} of buffers"]
    if document["replay_equals_eager"] is not None:
        lines += ["replay and step have equal bits" if document["replay_equals_eager"] else "REPLAY AND STEP DIFFER"]
    return "\n".join(lines)
