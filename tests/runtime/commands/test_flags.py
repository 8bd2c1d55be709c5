"""Unusual files, streams, flags and user code given to the commands."""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stepgraph import Engine, EngineConfig
from stepgraph.runtime import cli
from stepgraph.runtime.commands import bench, capture_check, terminal
from stepgraph.runtime.commands.engines import MAX_THREADS, set_threads
from stepgraph.runtime.commands.flags import STEP_EXAMPLE, check_serve
from stepgraph.runtime.commands.inputs import read_file, read_schema, read_standard_input
from stepgraph.runtime.commands.serve import open_engine
from stepgraph.runtime.demo.variants import toy_pair
from stepgraph.runtime.text import TextCodec
from stepgraph.sampling.grammar import Vocabulary
from tests.helpers.command_models import model_folder

Captured = pytest.CaptureFixture[str]
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
STEPS = """
import sys
from my_step import *
def leaves(): sys.exit(3)
def step_leaves(buffers): sys.exit(4)
def again(buffers): again(buffers)
def talks():
    print("hello")
    return step, buffers
"""


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_step.py").write_text(STEP_EXAMPLE, encoding="utf-8")
    (tmp_path / "odd_steps.py").write_text(STEPS, encoding="utf-8")
    (tmp_path / "no_python.py").write_text("def make(:\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("my_step", "odd_steps"):
        sys.modules.pop(name, None)


def run(capsys: Captured, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_byte_order_mark_is_ignored_and_line_ends_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = tmp_path / "marked", json.dumps(SCHEMA) + "\r\n\r\n"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_schema("--schema", str(path)) == SCHEMA
    assert read_schema("--schema", '{"const": 0.12345678901234567891}') == {"const": Decimal("0.12345678901234567891")}
    assert read_file("--prompt-file", str(path), "") == text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    assert read_standard_input("PROMPT") == text


def test_each_line_of_a_file_is_one_api_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# of the team\n\n sk-abc\n", encoding="utf-8")
    options = cli.make_parser().parse_args(["serve", "toy", "--port", "0", "--api-keys", str(tmp_path / "keys")])
    check_serve(options)
    assert options.api_keys == ["# of the team", "sk-abc"]


def test_adapters_of_repeated_flags_are_all_served() -> None:
    options = cli.make_parser().parse_args(["serve", "toy", "--port", "0", "--lora-modules", "a=x", "--lora-modules", "b=y", "c=z"])
    check_serve(options)
    assert options.lora_modules == {"a": "x", "b": "y", "c": "z"}


def test_the_toy_pair_is_served_without_its_draft() -> None:
    for flags, drafts in (["--draft", "none"], 0), (["-k", "2"], 2):
        with open_engine(cli.make_parser().parse_args(["serve", "toy", "--port", "0", *flags])) as engine:
            assert engine.limits.num_speculative_tokens == drafts


@pytest.mark.parametrize("count", [0, -1, MAX_THREADS + 1])
def test_numbers_of_threads_that_would_abort_torch_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"--threads: got {count}, expected a whole number from 1 to {MAX_THREADS}"):
        set_threads(argparse.Namespace(threads=count))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"token_ids": [5]}', "expected an object with text or messages"),
        ('{"text": ""}', "which has no tokens, expected at least one"),
        ('{"text": "a", "shcema": {}}', "and optionally a schema"),
        ('{"text": "a", "messages": []}', "and optionally a schema"),
        ('{"schema": {}}', "and optionally a schema"),
        ("[" * 100_000, "recursion"),
        ('{"text": "a", "schema": {"type": "string", "type": "integer"}}', "the key 'type' appears twice"),
    ],
)
def test_a_bad_prompt_is_reported_with_its_line_number(tmp_path: Path, line: str, message: str, capsys: Captured) -> None:
    (tmp_path / "prompts").write_text('\n{"text": "a"}\n' + line, encoding="utf-8")
    assert cli.main(["bench", "toy", "--prompts", str(tmp_path / "prompts")]) == terminal.BAD_INPUT
    error = capsys.readouterr().err
    assert message in error and "prompts:3: " in error and error.count("\n") == 1


@pytest.mark.parametrize("messages", [5, ["x"], [{"role": "user"}], [{"role": "user", "content": None}]])
def test_messages_without_a_chat_template_need_contents(messages: object) -> None:
    codec = TextCodec(Vocabulary.printable(), lambda text, begins: [1])
    with pytest.raises(ValueError, match=r"messages: got .*, expected a list of objects with a content"):
        bench._encode({"messages": messages}, codec)


def test_prompt_lines_end_at_newlines_only(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text('{"messages": [{"role": "user", "content": "a"}], "schema": {"const": "\u2028"}}\n', encoding="utf-8")
    (found,) = bench._read_prompts(argparse.Namespace(prompts=str(tmp_path / "prompts")), toy_pair().codec)
    assert "\u2028" in str(found.constraint) or "u2028" in str(found.constraint)


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize(
    ("arguments", "code", "messages"),
    [
        (["odd_steps:leaves"], 2, ["odd_steps:leaves() failed", "odd_steps.py:4", "SystemExit: 3"]),
        (["odd_steps:step_leaves", "--buffers", "my_step:buffers"], 1, ["the step failed", "odd_steps.py:5", "SystemExit: 4"]),
        (["odd_steps:again", "--buffers", "my_step:buffers"], 1, ["the step failed", "odd_steps.py:6", "RecursionError"]),
        (["no_python:make"], 2, ["importing no_python failed", "no_python.py", "SyntaxError"]),
        (["my_step:step"], 2, ["missing a required argument: 'buffers'", "to pass the step itself, use --buffers"]),
        (["my_step:make", "--buffers", "my_step:step"], 2, ["--buffers: got 'my_step:step' (missing a required argument"]),
        (["my_step:make", "--between", "my_step:buffers"], 2, ["--between: got 'my_step:buffers', which is a StaticBuffers"]),
        (["..x:make"], 2, ["MODULE:NAME: got '..x:make', expected a module"]),
    ],
)
def test_errors_of_user_code_show_the_users_lines(arguments: list[str], code: int, messages: list[str], capsys: Captured) -> None:
    assert cli.main(["capture-check", *arguments]) == code
    out, errors = capsys.readouterr()
    assert out == "" and all(words in errors for words in messages), errors
    assert "capture_check.py" not in errors and "frozen importlib" not in errors
    assert errors.count("\n") <= 2 * capture_check.MAX_FRAMES + 4


@pytest.mark.usefixtures("steps")
def test_output_of_user_code_goes_to_stderr(capsys: Captured) -> None:
    assert cli.main(["capture-check", "odd_steps:talks", "--json"]) == 0
    out, errors = capsys.readouterr()
    assert json.loads(out)["capturable"] and errors == "hello\n"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_unencodable_characters_are_escaped(monkeypatch: pytest.MonkeyPatch, encoding: str, errors: str) -> None:
    written, not_utf8 = io.BytesIO(), "\udcff"  # a byte of a path
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, errors=errors))

    def work() -> int:
        print(f"\u6f22{not_utf8}")
        terminal.print_json([f"\u6f22{not_utf8}"])
        return 0

    assert terminal.run_command("x", work) == 0
    text, document = written.getvalue().decode(encoding).split("\n", 1)
    assert text == ("\u6f22" if encoding == "utf-8" else "\\u6f22") + "\\udcff"
    assert json.loads(document) == [f"\u6f22{not_utf8}"]


def test_closed_standard_streams_are_replaced() -> None:
    """A daemon closes them. Reading the closed stdin gives an empty prompt."""
    script = """
import sys
from stepgraph.runtime.commands.inputs import read_standard_input
from stepgraph.runtime.commands.terminal import run_command, shows_progress

def work():
    print("a")
    print("b", file=sys.stderr)
    return 7 + len(read_standard_input("-")) + shows_progress()

sys.exit(run_command("x", work))
"""
    command = [sys.executable, "-c", script]
    assert subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], check=False, timeout=60).returncode == 7


def test_invalid_files_and_standard_input_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    (tmp_path / "latin").write_bytes("{é}".encode("latin-1"))
    model = str(model_folder())
    for name, message in (("list.json", "with a list, expected an object, true or false"), ("latin", "can't decode byte 0xe9")):
        code, _, errors = run(capsys, "generate", model, "hi", "--schema", str(tmp_path / name))
        assert code == 2 and "--schema: got '" in errors and message in errors
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    code, _, errors = run(capsys, "generate", model, "-")
    assert code == 2 and "got bytes that are not UTF-8" in errors and "expected text" in errors


def test_set_threads_sets_torch_threads() -> None:
    before = torch.get_num_threads()
    try:
        set_threads(argparse.Namespace(threads=before + 1))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_generate_reports_failures_and_prints_a_summary_on_terminals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """The weights are finite, the logits are not."""
    monkeypatch.setattr(terminal, "shows_progress", lambda: True)
    arguments = ("hi", "--max-new-tokens", "3", "-k", "0")
    code, _, errors = run(capsys, "generate", str(model_folder()), *arguments)
    assert code == 0 and "3 tokens in 3 rounds (3 from the target), " in errors and errors.rstrip().endswith(", length")
    shutil.copytree(model_folder(), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    code, _, errors = run(capsys, "generate", str(tmp_path / "model"), *arguments)
    assert code == 1 and "stepgraph generate: error: the target's best legal logit is not finite" in errors


def test_capture_check_refuses_objects_that_are_not_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    text = "def make():\n    return 5, 6\ndef other():\n    return make, 6\n"
    (tmp_path / "odd_pair.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    code, _, errors = run(capsys, "capture-check", "odd_pair:make")
    assert code == 2 and "odd_pair:make: got 5 as the step, expected a function of one argument, the buffers" in errors
    code, _, errors = run(capsys, "capture-check", "odd_pair:other")
    assert code == 2 and re.search(r"odd_pair:other: got <function make at 0x\w+> as the step, expected a function of one arg", errors)
    sys.modules.pop("odd_pair")
    code, _, errors = run(capsys, "capture-check", "builtins:dict")  # has no signature, so it is called
    assert code == 2 and "builtins:dict: got dict as its result, expected a function without arguments" in errors


def test_replay_reports_skipped_prompt_embeddings(tmp_path: Path, capsys: Captured) -> None:
    config = EngineConfig(max_rows=1, num_speculative_tokens=0, max_length=32, greedy_only=True, eager=True)
    with Engine.from_pretrained(model_folder(), config=config, record=tmp_path / "run.jsonl") as engine:
        engine.generate([1, 2, 3, 4], max_new_tokens=3)
        engine.generate([1, 2, 3, 4], prompt_embeddings={1: torch.ones(2, 32)}, max_new_tokens=3)
    code, out, _ = run(capsys, "replay", str(tmp_path / "run.jsonl"), "--model", str(model_folder()))
    assert code == 0 and "1 requests with prompt embeddings were skipped" in out
