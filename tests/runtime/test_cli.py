"""The `stepgraph` command: help, bad flags, terminals; as a process: pipes, Ctrl-C. test_commands.py tests its output."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import pty
import re
import runpy
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
import tty
import warnings
from pathlib import Path
from typing import IO

import pytest

import stepgraph
from stepgraph.runtime import cli
from stepgraph.runtime.commands import terminal
from stepgraph.runtime.commands.flags import COMMANDS
from tests.helpers.command_models import model_folder

SERVE = ("serve", "toy", "--port", "0", "--num-pages", "0")  # --num-pages is refused last: no test of another flag serves
# without a C compiler there is a RuntimeWarning, which another test checks
COMMAND = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "stepgraph"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=300, env={**os.environ, **environment}, check=False
    )


def start(*arguments: str, stderr: int | IO[bytes] = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """In its own process group, like a shell: Ctrl-C signals the whole group."""
    command = [*COMMAND, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "-k", "many"), "invalid int value"),
        (("generate", "/nowhere", "hi", "--schema", "{"), """--schema: got '{', which is not JSON"""),
        (("generate", "model", "hi", "--regex", "a", "--json-object"), "not allowed with argument"),
        (("generate", "model", "hi", "--choice", ""), "--choice: got '', expected a non-empty string"),
        (("generate", "model", "--regex", "a", "--after", "", "--token-ids", "1"), "--after: got '', expected a text or token ids"),
        (("bench", "toy", "--max-new-tokens", str(10**11)), ", the memory available; lower -k/--drafts, --max-new-tokens"),
        (("generate", "model", "hi", "--schema", ""), "--schema: got '' (empty), expected a JSON schema"),
        (("generate", "model", "--prompt-file", ""), "--prompt-file: got '' (empty), expected the path of a text file"),
        (("generate", "model", "hi", "--stop-token-ids", " "), "--stop-token-ids: got ' ', expected token ids such as 1,2,3"),
        (("generate", str(model_folder()), "hi", "--draft", "/"), "--draft: got '/', expected a local folder with a config.json"),
        (("bench", "toy", "--draft", ""), "--draft: got '' with the toy pair, expected auto or none"),
        (("demo", "--toy", "--out", ""), "argument --out: got '', expected a path"),
        (("demo", "--toy", "--html", ""), "argument --html: got '', expected a path"),
        (("demo", "--toy", "--out", "a", "--no-timeline"), "argument --no-timeline: not allowed with argument --out"),
        (("replay", "", "--model", "toy"), "argument FILE: got '', expected a path"),
        ((*SERVE, "--name", ""), "--name: got '', expected a name"),
        ((*SERVE, "--max-lora-rank", "8"), "--max-lora-rank: got 8 without --lora-modules, expected 16"),
        ((*SERVE, "--resume", "never"), "--resume: got 'never' without --replicas, expected 'exact'"),
        ((*SERVE, "--replica-cpus", "2"), "--replica-cpus: got 2.0 without --replicas, expected 1.0"),
        ((*SERVE, "--replica-gpus", "1"), "--replica-gpus: got 1.0 without --replicas, expected 0.0"),
        (("serve", str(model_folder()), *"--port 0 --lora-modules a=/".split()), "--lora-modules: a=/: /adapter_config.json: No such file"),
        (("fly",), "invalid choice"),
        ((), "COMMAND"),
    ],
)
def test_bad_flags_exit_with_2_and_a_reason(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = cli.main(arguments)
    except SystemExit as ended:  # of argparse
        code = ended.code
    errors = capsys.readouterr().err
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors


def test_a_process_has_the_exit_code_and_the_reason_of_its_command() -> None:
    result = run("generate", "/nowhere", "hi", "--schema", "{")
    assert (result.returncode, result.stdout) == (2, "") and result.stderr.startswith("stepgraph generate: --schema: got '{'")
    assert run("fly").returncode == 2


def test_bad_input_exits_with_2_if_stderr_cannot_be_written() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*COMMAND, "check-schema", "{"], stdout=subprocess.PIPE, stderr=full, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (terminal.BAD_INPUT, b"")


def test_help_and_version_do_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    words = run("--help", PYTHONPATH=path).stdout
    for word, command in COMMANDS.items():
        assert word in words and command.summary.split(",")[0] in " ".join(words.split())
    result = run("generate", "--help", PYTHONPATH=path)
    assert (result.returncode, result.stderr) == (0, "") and "examples:" in result.stdout
    assert "torch was imported" in run("demo", PYTHONPATH=path).stderr, "the planted module is found"
    assert run("--version").stdout == f"stepgraph {stepgraph.__version__}\n"


def test_a_closed_pipe_ends_a_command_quietly() -> None:
    script = """
import sys
from stepgraph.runtime.commands.terminal import run_command
sys.exit(run_command('x', lambda: [print(1) for _ in iter(int, 1)]))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(2) == b"1\n"
    process.stdout.close()
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (terminal.OUTPUT_CLOSED, b"")


@pytest.mark.soak
def test_closing_the_output_ends_generate_quietly() -> None:
    """The rest of the answer is not computed, and there is no broken-pipe message."""
    process = start("generate", str(model_folder()), "abc", "-k", "0", "--max-new-tokens", "3000", "--min-new-tokens", "3000")
    assert process.stdout is not None
    assert len(process.stdout.read(10)) == 10
    process.stdout.close()
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (terminal.OUTPUT_CLOSED, b"")


def test_closing_the_output_of_help_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, "--help"], stdout=writer, stderr=subprocess.PIPE, timeout=300, check=False)
    os.close(writer)
    assert done.stderr == b"" and done.returncode in (0, terminal.OUTPUT_CLOSED), "some versions of argparse ignore the error"


def test_ctrl_c_exits_cleanly() -> None:
    """With the usual exit code, one line, and no process left, including the grammar worker.

    The pipe has room for 100 more bytes, so the command cannot finish its answer before the signal.
    """
    reader, writer = os.pipe()
    room = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"." * (room - 100))
    flags = ("-k", "0", "--regex", "[a-z]{2,4000}", "--max-new-tokens", "3000", "--min-new-tokens", "3000")
    command = [*COMMAND, "generate", str(model_folder()), "abc", *flags]
    process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=handle_sigint)
    os.close(writer)
    while waiting_bytes(reader) < room:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    with os.fdopen(reader, "rb") as output:
        assert output.read().startswith(b".")
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (terminal.INTERRUPTED, b"stepgraph generate: interrupted\n")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


class Interrupting:
    """Finds no module; the search for one of them is interrupted."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, *_: object) -> None:
        if name == self.name:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("name", ["stepgraph.runtime.cli", "stepgraph.runtime.commands.doctor"])
def test_ctrl_c_within_an_import_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["stepgraph", "doctor"])
    monkeypatch.setattr(sys, "meta_path", [Interrupting(name), *sys.meta_path])
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(sys.modules, "stepgraph.__main__", raising=False)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
            runpy.run_module("stepgraph", run_name="__main__")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert isinstance(ended.value, SystemExit) and ended.value.code == terminal.INTERRUPTED
    assert re.fullmatch(r"stepgraph( doctor)?: interrupted\n", capsys.readouterr().err)


def test_a_library_that_drops_an_interrupt_at_its_import_does_not_keep_the_command_running(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As parts of torch do."""

    def import_module(name: str) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(importlib, "import_module", import_module)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli.main(["doctor"]) == terminal.INTERRUPTED
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
    assert capsys.readouterr().err == "stepgraph doctor: interrupted\n"


def handle_sigint() -> None:
    """A shell's background processes ignore SIGINT, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def waiting_bytes(reader: int) -> int:
    """Bytes in a pipe that were not read yet."""
    return int.from_bytes(fcntl.ioctl(reader, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.parametrize("isatty", [True, False])
def test_internal_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], isatty: bool) -> None:
    def work() -> int:
        if isatty:  # otherwise pytest records it
            warnings.warn(f"unusual {HOSTILE}", stacklevel=1)
        raise AssertionError(f"a bug {HOSTILE}")

    monkeypatch.setattr(sys.stderr, "isatty", lambda: isatty, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert terminal.run_command("stepgraph x", work) == terminal.FAILED
    written, shown = capsys.readouterr().err, VISIBLE if isatty else HOSTILE
    assert "in work\n" in written and written.endswith(f"AssertionError: a bug {shown}\n")
    assert (f"UserWarning: unusual {VISIBLE}\n" in written) == isatty


@pytest.mark.parametrize(
    ("terminal_like", "environment", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_colours_need_a_terminal_and_no_no_color(
    monkeypatch: pytest.MonkeyPatch, terminal_like: bool, environment: dict[str, str], expected: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal_like, raising=False)
    assert terminal.colour_enabled(sys.stdout) == expected


CLEAR_AND_RETITLE = "\x1b[2J\x1b]0;title\x07 \x9b2J caf\u00e9\tb\n"


@pytest.mark.parametrize("isatty", [True, False])
def test_control_characters_are_escaped_on_terminals_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], isatty: bool
) -> None:
    """Model output, errors that quote input, and arguments that argparse quotes."""
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: isatty, raising=False)

    def work() -> int:
        terminal.print_text(CLEAR_AND_RETITLE, end="")
        raise ValueError(CLEAR_AND_RETITLE)

    assert terminal.run_command("x", work) == terminal.BAD_INPUT
    expected = "\\x1b[2J\\x1b]0;title\\x07 \\x9b2J caf\u00e9\tb\n" if isatty else CLEAR_AND_RETITLE
    assert capsys.readouterr() == (expected, f"x: {expected}\n")
    with pytest.raises(SystemExit):
        cli.main(["doctor", CLEAR_AND_RETITLE])
    assert expected in capsys.readouterr().err


def test_generate_escapes_model_output_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(model_folder()), "hi", "--choice", "a\x1b]0;title\x07b", "--max-new-tokens", "32"]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == "a\x1b]0;title\x07b\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == "a\\x1b]0;title\\x07b\n"
    assert cli.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "a\x1b]0;title\x07b"


HOSTILE, VISIBLE = "\x1b]0;title\x07\x9b2J", "\\x1b]0;title\\x07\\x9b2J"


def written(arguments: list[str], to_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command writes to both streams, which are a terminal or a pipe."""
    reader, writer = pty.openpty() if to_terminal else os.pipe()
    if to_terminal:
        tty.setraw(writer)  # no translation of newlines
    parts: list[bytes] = []

    def collect() -> None:
        while part := os.read(reader, 1 << 16):
            parts.append(part)
            if part.endswith(b"\0"):
                return

    thread = threading.Thread(target=collect)
    thread.start()
    with monkeypatch.context() as patch, os.fdopen(writer, "w", encoding="utf-8") as stream:
        patch.setenv("NO_COLOR", "1")
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        try:
            with contextlib.suppress(SystemExit):  # of argparse
                cli.main(arguments)
        finally:
            stream.write("\0")
            stream.flush()
            thread.join()
    os.close(reader)
    return b"".join(parts).decode().removesuffix("\0")


QUOTING = {
    "generate, the model": ["generate", "BROKEN", "hi"],
    "generate, the schema": ["generate", "MODEL", "hi", "--schema", "SCHEMA"],
    "inspect": ["inspect", "BROKEN"],
    "check-schema": ["check-schema", "SCHEMA"],
    "serve": ["serve", "BROKEN", "--port", "0"],
    "serve, an adapter": ["serve", "MODEL", "--port", "0", "--eager", "--lora-modules", "a=BROKEN"],
    "serve, a flag": ["serve", "toy", "--HOSTILE"],
}


@pytest.mark.parametrize("name", QUOTING)
def test_quoted_input_is_escaped_on_a_terminal_and_unchanged_in_a_pipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, broken = tmp_path / f"model{HOSTILE}", tmp_path / f"broken{HOSTILE}"
    shutil.copytree(model_folder(), model)
    broken.mkdir()
    shutil.copy(model / "tokenizer.json", broken)
    (broken / "config.json").write_text("{")
    schema = json.dumps({"properties": {HOSTILE: {"type": "strange"}}})
    values = {"BROKEN": str(broken), "MODEL": str(model), "SCHEMA": schema, "HOSTILE": HOSTILE}
    arguments = [re.sub("[A-Z]{5,}", lambda found: values[found[0]], argument) for argument in QUOTING[name]]
    shown = written(arguments, True, monkeypatch)
    assert VISIBLE in shown and not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", shown), "carriage returns are from progress output"
    assert HOSTILE in written(arguments, False, monkeypatch)


def test_a_host_name_that_cannot_be_encoded_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "toy", "--host", f"x{HOSTILE}"]) == terminal.BAD_INPUT
    assert f"--host, --port: got 'x{VISIBLE}', 8000 (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("generate model x --max-tokens 3", "; expected --max-new-tokens"),
        ("generate model x --max_tokens=3", "; expected --max-new-tokens"),
        ("generate model x --n-predict 3", "; expected --max-new-tokens"),
        ("generate model x --stop-strings a", "; expected --stop"),
        ("generate model x --guided-regex a", "; expected --regex"),
        ("generate model x --json-schema a", "; expected --schema"),
        ("generate model x --guided-grammar a", "; expected --grammar"),
        ("serve model --max-num-seqs 4", "; expected --max-rows"),
        ("serve model --max-model-len 4", "; expected --max-length"),
        ("serve model --speculative-model a", "; expected --draft"),
        ("serve model --model a", "; expected MODEL"),
        ("serve model --tensor-parallel-size 2", "; expected --tensor-parallel"),
        ("serve model --max-row-s 2", "; expected --max-rows"),
        ("serve model --served-model-name a", "; expected --name"),
        ("serve model --ctx-size 512", "; expected --max-length"),
        ("serve model --max-len 512", "; expected --max-length"),
        ("serve model --max 512", ""),
        ("generate model hi --n", "; expected --seed"),
        ("serve model --tool-call-parser hermes", "; expected --tool-format"),
        ("generate model --alias a", ""),
        ("bench toy --nothing-like-it", ""),
        ("bench toy twice", ""),
    ],
)
def test_an_unknown_flag_is_refused_with_the_usage_and_the_flag_of_the_command(
    line: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(line.split())
    command, _, errors = line.split()[0], *capsys.readouterr()
    assert errors.startswith(f"usage: stepgraph {command} ")
    unknown = line[line.index("--") :] if "--" in line else "twice"
    assert errors.splitlines()[-1] == f"stepgraph {command}: error: unrecognized arguments: {unknown}{hint}"


@pytest.mark.parametrize("colours", [True, False])
def test_generate_colours_tokens_by_origin_and_counts_them(
    colours: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "" if colours else "1")
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert cli.main(["generate", str(model_folder()), "hi", "--draft", "forced", "--choice", "abcdefghij", "--max-new-tokens", "32"]) == 0
    out, errors = capsys.readouterr()
    assert ("\x1b[1m" in out, "\x1b[1m" in errors) == (colours, colours), "each round ends with a target token, in bold"
    assert re.sub("\x1b\\[[0-9]*m", "", out) == "abcdefghij\n"
    found = re.search(
        r"(\d+) tokens in \d+ rounds \((?:(\d+) forced by the grammar, )?(\d+) from the target\), ", re.sub("\x1b\\[\\d*m", "", errors)
    )
    assert found is not None and int(found[1]) == int(found[2] or 0) + int(found[3])


def test_json_output_has_no_raw_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_json({"text": "\x9b2J\x7f"})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"text": "\x9b2J\x7f"} and "\x9b" not in printed and "\x7f" not in printed


def test_values_without_a_json_type_become_strings(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_json({"a": [Path("x"), None, True, 1.5, "\u00e9"]})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"a": ["x", None, True, 1.5, "\u00e9"]} and "\u00e9" in printed
