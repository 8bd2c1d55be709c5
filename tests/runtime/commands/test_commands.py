"""Output of the commands with a tiny random model from a folder: every example of --help, flags, and errors."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepgraph.graphs.graph_set import GraphSet
from stepgraph.runtime import cli
from stepgraph.runtime.commands import bench, doctor, generate, serve, terminal
from stepgraph.runtime.commands.flags import COMMANDS, STEP_EXAMPLE, check_generate
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.files.weights import SafetensorsSource
from stepgraph.runtime.serve import app
from stepgraph.runtime.serve.serving import Serving
from stepgraph.runtime.text import TextCodec
from stepgraph.sampling import native
from tests.helpers.command_models import compile_without_new_workers, doctor_answers, model_folder, recordings
from tests.helpers.documents import DOCUMENTS

SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
MODULES = {
    "my_step.py": STEP_EXAMPLE,
    "wrong_steps.py": """
from my_step import buffers; from stepgraph.graphs import current_context
calls = []
def syncs(buffers):
    buffers.y.mul_(buffers.x.max().item())
def fails(buffers):
    raise KeyError("x")
def bakes(buffers):
    buffers.y.mul_(float(len(calls)))
def on_host(buffers):
    current_context().host_node("waits", nothing)
    buffers.y.zero_()
def again():
    calls.append(1)
def nothing():
    return None
""",
    "broken.py": "import my_step\nraise RuntimeError('no licence')\n",
    "needs.py": "import there_is_no_such_package\n",
    "empty.gbnf": "",
}
SLOW = ("stepgraph demo", "stepgraph bench toy", "stepgraph doctor")  # run by other tests


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder has the files that the examples of --help name."""
    (tmp_path / "model").symlink_to(model_folder())
    for name in ("run.jsonl", "toy.jsonl"):
        (tmp_path / name).write_bytes((recordings() / name).read_bytes())
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    lines = [{"text": "the cat", "schema": SCHEMA}, {"messages": [{"role": "user", "content": "hi"}], "schema": SCHEMA}]
    (tmp_path / "person.json").write_text(json.dumps(SCHEMA), encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "run_probes", doctor_answers)
    monkeypatch.setattr(sys, "path", list(sys.path))
    compile_without_new_workers(monkeypatch)
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name.removesuffix(".py"), None)


def run(arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.main(shlex.split(arguments))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def run_json(arguments: str, capsys: pytest.CaptureFixture[str]) -> Any:
    code, out, errors = run(arguments + " --json", capsys)
    assert (code, errors) == (0, ""), errors
    return json.loads(out)


def type_in(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


def examples() -> Iterator[Any]:
    for word, command in COMMANDS.items():
        assert 2 <= len(command.examples) <= 4, word
        for example in command.examples:
            yield pytest.param(word, example, marks=[pytest.mark.soak] if example.startswith(SLOW) else [])


@pytest.mark.parametrize(("word", "example"), list(examples()))
def test_examples_of_help_run(word: str, example: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given, _, command = example.rpartition(" | ")
    if word == "serve":  # a signal ends it
        announce = serve.print_address

        def announce_and_stop(*given: Any) -> None:
            announce(*given)
            os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(serve, "print_address", announce_and_stop)
    if given:
        type_in(shlex.split(given)[1].encode(), monkeypatch)
    assert shlex.split(command)[:2] == ["stepgraph", word]
    code, out, _ = run(command.removeprefix("stepgraph"), capsys)
    assert code == 0 and out.strip()
    assert "\x1b[0m" not in out
    if "--json" in command:
        json.loads(out)


def test_serve_reports_an_unusable_address_before_it_opens_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flags, got in (
            (f"--port {port}", rf"'127\.0\.0\.1', {port} \(Address already in use.*\)"),
            ("--host 'a\0b'", r"'a\\x00b', 8000 \(host name must not contain null character\)"),
            ("--host ''", r"'', 8000 \(0\.0\.0\.0 listens on all addresses\)"),
            ("--host 203.0.113.1", r"'203\.0\.113\.1', 8000 \(.*assign requested address.*\)"),  # reserved: an address of no machine
        ):
            code, out, errors = run(f"serve nowhere {flags}", capsys)
            expected = rf"stepgraph serve: --host, --port: got {got}, expected an address of this machine and a free port\n"
            assert (code, out) == (2, "") and re.fullmatch(expected, errors), errors


def test_a_served_model_is_named_after_its_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = list[str]()

    class NamedApp(app.App):
        def __init__(self, serving: Serving, name: str, *others: Any) -> None:
            super().__init__(serving, name, *others)
            names.append(name)

    monkeypatch.setattr(app, "App", NamedApp)
    monkeypatch.setattr(serve, "print_address", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.chdir(folder / "model")
    assert run("serve . --port 0 --eager", capsys)[0] == 0 and names == [Path.cwd().name]
    errors = run(f"serve . --port 0 --lora-modules {names[0]}=x", capsys)[2]
    assert f"expected NAME=FOLDER with a name that neither the model ({names[0]}) nor another adapter has" in errors


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--regex '[ab]{3,5}x'", r"[ab]{3,5}x"),
        ("--grammar g.gbnf", r"(ab)+c"),
        ("--grammar g.lark", r"x|y"),
        ("--choice 'a b' --choice \u00e9\u6f22", r"a b|\u00e9\u6f22"),
    ],
)
def test_generated_text_obeys_its_constraint(flags: str, pattern: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "g.gbnf").write_text('root ::= ("ab")+ "c"', encoding="utf-8")
    (folder / "g.lark").write_text('start: "x" | "y"', encoding="utf-8")
    code, out, errors = run(f"generate model hi --max-new-tokens 24 --temperature 1 --seed 2 {flags}", capsys)
    if code == 0:
        assert re.fullmatch(pattern, out.rstrip("\n"))
    else:
        assert "cut short" in errors


@pytest.mark.parametrize(("marker", "expected"), [("<|im_end|>", (2,)), ("so:", "so:"), ("<think>", "<think>")])
@pytest.mark.parametrize("prompt", ["hi", "--token-ids=1"])
def test_a_marker_is_a_text_or_control_tokens(prompt: str, marker: str, expected: object) -> None:
    options = cli.make_parser().parse_args(["generate", "model", prompt, "--json-object", "--after", marker])
    check_generate(options)
    constraint = generate._read_request(options).constraint
    assert constraint is not None and constraint.marker == expected


def test_streamed_text_equals_the_json_text(capsys: pytest.CaptureFixture[str]) -> None:
    """The same text with and without --json, and with and without drafts."""
    flags = "generate model 'the cat' --max-new-tokens 60 --temperature 1 --seed 4"
    document = run_json(flags, capsys)
    assert run(flags, capsys)[1] == document["text"] + "\n"
    assert run_json(flags.replace("--temperature 1", ""), capsys)["token_ids"] == document["token_ids"], "a seed alone samples"
    plain = run_json(f"{flags} --draft none", capsys)
    assert plain["token_ids"] == document["token_ids"]
    assert plain["rounds"] == plain["tokens"] >= document["rounds"]
    assert document["finish_reason"] in ("length", "stop") and document["seed"] == 4
    assert document["tokens_per_round"] == document["tokens"] / document["rounds"]
    assert document["stats"]["host_syncs"] == 0


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "generate model 'the cat' --max-new-tokens 60 --temperature 1 --seed 4"
    whole = run_json(flags, capsys)
    stop = whole["text"][10:13]
    expected = whole["text"][: whole["text"].find(stop)]
    flags += f" --stop {shlex.quote(stop)} --stop nowhere"
    assert run(flags, capsys)[1] == expected + "\n"
    cut = run_json(flags, capsys)
    assert (cut["text"], cut["finish_reason"]) == (expected, "stop")
    assert cut["tokens"] < whole["tokens"] and cut["token_ids"] == whole["token_ids"][: cut["tokens"]]


def test_generate_records_the_graphs_of_its_answer_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each recorded graph delays the first token, and so do the device tables of a vocabulary."""
    recorded, record = list[Any](), GraphSet.record_one

    def listed(recorder: GraphSet, key: Any) -> Any:
        recorded.append(key)
        return record(recorder, key)

    monkeypatch.setattr(GraphSet, "record_one", listed)
    for flags, constrained in (("", False), ("--regex '[a-z]{3}'", True)):
        recorded.clear()
        notes = run_json(f"generate model hi --max-new-tokens 8 {flags}", capsys)["notes"]
        assert {key.draft_length for key in recorded} == {0, 4}, "calibrated"
        on_host = constrained and native.why_not()  # its first cost estimates are those of rounds without grammars, recorded too
        assert on_host or len(recorded) == 2
        assert {(key.rows, key.constrained, key.sampled) for key in recorded} == {
            (1, constrained, False),
            *([(1, False, False)] * bool(on_host)),
        }
        assert any(note.startswith("grammar lane: device") for note in notes) == (constrained and not native.why_not())


def test_models_of_both_implementations_give_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "generate model 'the cat' --max-new-tokens 8 --dtype float32 --draft none --implementation"
    native, other = (run_json(f"{flags} {name}", capsys) for name in ("native", "transformers"))
    assert native["token_ids"] == other["token_ids"]
    assert "transformers" in str(other["notes"]) and "transformers" not in str(native["notes"])


def test_inspect_prints_the_bytes_of_loaded_weights_without_reading_any(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sum(parameter.nbytes for parameter in open_checkpoint(folder / "model").load("cpu").parameters())
    monkeypatch.setattr(SafetensorsSource, "read", None)
    document = run_json("inspect model --draft model", capsys)
    assert document["family"] == "LlamaForCausalLM" and document["layers"] == 2 and document["refused"] == {}
    assert [(way["implementation"], way["weights"]) for way in document["runs"]] == [
        ("native", "dequantised"),
        ("transformers", "dequantised"),
    ]
    assert [sum(way["bytes"].values()) for way in document["runs"]] == [expected, expected]
    assert document["drafters"] == ["model (draft, up to 8 drafts; 0.1 MiB in float32)", "ngram", "forced"]
    for word in ("auto", "forced", "ngram", "none"):
        document = run_json(f"inspect model --draft {word}", capsys)
        assert (document["drafters"], document["refused"]) == (["ngram", "forced"], {})


def test_inspect_gives_the_reason_of_each_refusal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = shutil.copytree(folder / "model", folder / "other")
    generation = {"eos_token_id": 2, "temperature": 0.6, "top_k": None, "suppress_tokens": [5]}
    (other / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    assert run("inspect other", capsys)[1].splitlines()[-1] == "not read: temperature, suppress_tokens of generation_config.json"
    fields = json.loads((other / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps(fields | {"quantization_config": {"quant_method": "bitsandbytes"}}), encoding="utf-8")
    code, out, _ = run("inspect other --json", capsys)
    document = json.loads(out)
    assert (code, document["runs"]) == (terminal.FAILED, [])
    assert "quantization_config.quant_method: got 'bitsandbytes', expected" in document["refused"]["native, dequantised"]
    assert "quantization_config" in document["refused"]["transformers, dequantised"]
    code, out, _ = run("inspect model --draft other --json", capsys)
    with_draft = json.loads(out)
    assert code == terminal.FAILED and with_draft["runs"] and "bitsandbytes" in with_draft["refused"]["draft"]
    (folder / "empty").mkdir()
    code, out, _ = run("inspect empty --json", capsys)
    refused = json.loads(out)["refused"]
    assert code == terminal.FAILED and refused.keys() == {"native, dequantised", "transformers, dequantised"}
    assert all(reason.startswith("path: got 'empty', expected a local folder with a config.json") for reason in refused.values())


def test_all_prompt_sources_give_the_same_ids(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    codec, rest = TextCodec.open(folder / "model"), "--max-new-tokens 3"
    chat = codec.chat([{"role": "user", "content": "the cat\n"}])
    (folder / "prompt.txt").write_text("the cat\n", encoding="utf-8")
    type_in(b"the cat\n", monkeypatch)
    ways = ["--prompt-file prompt.txt", "-", f"--token-ids '{','.join(map(str, chat))}'"]
    found = [run_json(f"generate model {way} {rest}", capsys) for way in ways]
    assert [each["prompt_tokens"] for each in found] == [len(chat)] * 3
    assert len({tuple(each["token_ids"]) for each in found}) == 1
    with_system = codec.chat([{"role": "system", "content": "x"}, {"role": "user", "content": "a"}])
    assert run_json(f"generate model a --system x {rest}", capsys)["prompt_tokens"] == len(with_system)
    assert run_json(f"generate model 'the cat' --no-chat {rest}", capsys)["prompt_tokens"] == len(codec.encode("the cat"))


def test_an_answer_cut_short_of_its_schema_fails(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = run(f"generate model hi --schema '{json.dumps(SCHEMA)}' --max-new-tokens 2", capsys)
    assert code == terminal.FAILED
    assert "cut short by --max-new-tokens 2: the end of the text was not reached" in errors
    code, out, _ = run(f"generate model hi --schema '{json.dumps(SCHEMA)}' --max-new-tokens 2 --json", capsys)
    assert code == terminal.FAILED and "cut short" in json.loads(out)["error"]


def test_an_answer_that_is_complete_at_the_limit_does_not_fail(capsys: pytest.CaptureFixture[str]) -> None:
    document = run_json("generate model hi --choice a --choice b --max-new-tokens 1", capsys)
    assert document["text"] in ("a", "b") and (document["finish_reason"], document["error"]) == ("length", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate model", "PROMPT: got none"),
        ("generate nowhere hi", "MODEL: got 'nowhere', expected a local folder with a tokenizer.json"),
        ("generate model hi --schema nowhere.json", "--schema: got 'nowhere.json' (No such file or directory), expected a JSON schema"),
        ("generate model hi --schema '{\"type\": '", "which is not JSON"),
        ("generate model hi --schema prompts.jsonl", "which is not JSON"),
        ('generate model hi --schema \'{"type": "object", "unevaluatedProperties": 1}\'', "unevaluatedProperties"),
        ("generate model hi --grammar my_step.py", "--grammar: got 'my_step.py', expected a file with the suffix .ebnf, .gbnf, .lark"),
        ("generate model hi --grammar empty.gbnf", "stepgraph generate: --grammar: got '', expected a non-blank string"),
        ("generate model hi --after x", "--after: got 'x' without a constraint, expected --schema"),
        ("generate nowhere hi --regex '('", "--regex: cannot be compiled: pattern: got the end at position 1, expected a closing"),
        ('generate nowhere hi --schema \'{"type": "strnig"}\'', '#: type: got "strnig", expected one or several of null'),
        ("generate nowhere hi --schema '{\"enum\": []}'", "no value satisfies #: enum"),
        ("generate model hi --stop-token-ids 1,x", "--stop-token-ids: got '1,x', expected token ids"),
        ("generate model hi --stop-token-ids 99999", "--stop-token-ids: got 99999"),
        ("generate nowhere hi --stop ''", "--stop: got '', expected a text of 1 to"),
        ("generate model hi --top-p 3", "--top-p: got 3.0, expected a number above 0 and at most 1"),
        ("generate model hi --temperature nan", "--temperature: got nan"),
        ("generate model hi --max-new-tokens 9999", "--max-new-tokens: got 9999 after a prompt of"),
        ("generate nowhere hi --max-new-tokens 5 --min-new-tokens 9", "--min-new-tokens: got 9, expected a whole number from 0 to 5"),
        ("generate model hi --max-new-tokens 0", "--max-new-tokens: got 0, expected a whole number >= 1"),
        ("generate model '' --no-chat", "PROMPT: got '', which has no tokens"),
        ("generate model hi -k 9", "stepgraph generate: -k/--drafts: got 9, expected a whole number from 0 to 8"),
        ("generate model hi --draft-length 5", "--draft-length: got 5, expected at most -k/--drafts 4, or 'auto'"),
        ("generate model hi --draft-length longest", "--draft-length: got 'longest', expected 'auto', or an integer"),
        ("inspect nowhere", "MODEL: got 'nowhere', which does not exist, expected a local folder"),
        ("inspect ''", "MODEL: got '', which does not exist, expected a local folder"),
        ("inspect model --draft nowhere", "--draft: got 'nowhere', which does not exist, expected a local folder"),
        ("generate model hi --regex \udcff", "--regex: got half of a surrogate pair at position 0, expected text"),
        ('generate model hi --schema \'{"const": "\\ud800"}\'', "--schema: got half of a surrogate pair at position 10, expected text"),
        ("generate model hi --draft nobody", "got 'nobody'"),
        ("generate model hi --draft ''", "--draft: got '', expected a path"),
        ("generate model hi --implementation transformers --weights quantised", "--weights: got 'quantised' with --implementation "),
        ("generate model hi --threads 0", "--threads: got 0, expected a whole number from 1 to"),
        ("generate model --token-ids 1,2 --system x", "--token-ids: got it with --chat or --system"),
        ("generate model hi --no-chat --system x", "--system: got 'x' for a plain prompt"),
        ("generate model --token-ids ''", "--token-ids: got"),
        ("generate model --token-ids 1,99999", "--token-ids: got 99999"),
        ("bench nowhere", "MODEL: got 'nowhere'"),
        ("bench model --max-new-tokens 99999 --draft none", "--max-new-tokens: got 99999 after a prompt of"),
        ("bench toy --repeats 0", "--repeats: got 0, expected a whole number >= 1"),
        ("bench toy --prompts my_step.py", "my_step.py:2: "),
        ("bench toy --prompts empty", "expected at least one"),
        ("bench model --draft ngram -k 99", "stepgraph bench: -k/--drafts: got 99"),
        ("bench model --draft none --look-up 2", "--look-up: got 2 without a draft, expected 0"),
        ("bench toy -k 0 --look-up 2", "--look-up: got 2 with -k/--drafts 0, expected 0"),
        ("serve toy --port 0 --eager -k 9", "stepgraph serve: -k/--drafts: got 9, expected a whole number from 0 to 8"),
        ("serve toy --port 0 --lora-modules a=b", "--lora-modules: got 1, expected 0: ToyTarget has no lora_weights"),
        ("serve model --port 0 --max-length 99999", "--max-length: got 99999, expected at most"),
        ("capture-check my_step.py:make", "expected a module and a name in it"),
        ("capture-check nowhere:make", "there is no module 'nowhere'"),
        ("capture-check my_step:unmade", "my_step has no 'unmade'"),
        (
            "capture-check wrong_steps:nothing",
            "got NoneType as its result, expected a function without arguments that returns",
        ),
        ("capture-check my_step:buffers", "expected a function without arguments"),
        ("capture-check my_step:step --buffers wrong_steps:nothing", "got NoneType as the buffers, expected StaticBuffers"),
        ("check-schema nowhere", "FILE: got 'nowhere' (No such file"),
        ("check-schema my_step.py", "FILE: got 'my_step.py', which is not JSON"),
        ("check-schema prompts.jsonl", "which is not JSON"),
        ('check-schema \'{"type": "string", "type": "integer"}\'', "the key 'type' appears twice"),
        ("demo -k 9", "-k/--drafts: got 9, expected a whole number from 1 to 8"),
        ("demo --toy --threads 0", "--threads: got 0, expected a whole number from 1 to"),
        ("replay nowhere --model toy", "nowhere: No such file or directory, expected a file written by Engine(record=...)"),
        ("replay prompts.jsonl --model toy", 'prompts.jsonl:1: got b\'{"text": "the cat"'),
        ("replay toy.jsonl --model toy --draft ngram", "--draft: got 'ngram' with the toy pair, expected auto or none: it has no"),
        ("replay toy.jsonl --model toy --dtype float16", "--dtype: got 'float16' with the toy pair, expected no flag"),
        ("bench toy --dtype bfloat16", "--dtype: got 'bfloat16' with the toy pair, expected no flag"),
        ("bench toy --weights quantised", "--weights: got 'quantised' with the toy pair, expected dequantised"),
        ("bench toy --draft ngram", "--draft: got 'ngram' with the toy pair, expected auto or none"),
        ("serve toy --port 0 --implementation transformers", "--implementation: got 'transformers' with the toy pair, expected auto"),
        ("serve toy --port 0 --draft mtp", "--draft: got 'mtp' with the toy pair, expected auto or none"),
        ("replay run.jsonl --model toy", "run.jsonl: draft: got {'class': 'ToyDraft', "),
        ("replay run.jsonl --model model --draft none", "draft: got None, expected the recorded {'class': 'NgramLookup', "),
        ("replay toy.jsonl --model model", "draft: got {'class': 'NgramLookup', 'tensors': 0, "),
        ("replay toy.jsonl --model toy --draft none", "draft: got None, expected the recorded {'class': 'ToyDraft', "),
    ],
)
def test_bad_input_exits_with_2_and_one_line(arguments: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "empty").write_text("\n", encoding="utf-8")
    code, out, errors = run(arguments, capsys)
    assert (code, out) == (terminal.BAD_INPUT, "")
    assert message in errors and errors.startswith(f"stepgraph {arguments.split()[0]}: ")
    assert errors.count("\n") == 1, "one line"


def test_bench_compares_variants(capsys: pytest.CaptureFixture[str]) -> None:
    document = run_json("bench model --draft forced -k 3 --draft-length 3 --repeats 1 --max-new-tokens 16 --prompts prompts.jsonl", capsys)
    rows = {row["variant"]: row for row in document["variants"]}
    assert list(rows) == ["plain", "plain + grammar", "speculative", "speculative + grammar"]
    assert document["same_texts"] == {"free": "2 of 2", "grammar": "2 of 2"} and document["failed"] == []
    assert all(row["least"] <= row["tokens_per_second"] <= row["most"] and row["host_syncs"] == 0 for row in rows.values())
    assert all(row["rounds"] == row["replays"] for row in rows.values())
    assert rows["plain"]["tokens_per_round"] == 1.0, "rounds that were in flight when an answer ended are not counted"
    assert rows["plain"]["mask_fills"] == rows["speculative"]["mask_fills"] == 0
    assert (rows["plain + grammar"]["mask_fills"] == 0) == (not native.why_not()), "the host fills masks if the device cannot"
    assert rows["plain"]["accepted_length"] is None and rows["speculative + grammar"]["accepted_length"] > 1.5, "forced drafts are accepted"
    ratio = document["ratios"][2]
    assert (ratio["of"], ratio["to"]) == ("speculative + grammar", "plain + grammar")
    assert ratio["ratio"] == rows[ratio["of"]]["tokens_per_second"] / rows[ratio["to"]]["tokens_per_second"]
    assert ratio["tokens_per_round"] > 1.5 and ratio["ratio"] * ratio["time_of_a_round"] == pytest.approx(ratio["tokens_per_round"])
    code, out, _ = run("bench toy --draft none --repeats 1 --max-new-tokens 8", capsys)
    of_readme = bench.README_RATES["plain + grammar"] / bench.README_RATES["plain"]
    assert code == 0 and "speculative  " not in out and re.search(rf"plain \+ grammar : plain  .*  {of_readme:.2f}\n", out)


def test_bench_takes_no_more_positions_than_its_answers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = Path(shutil.copytree(model_folder(), folder / "short"))
    settings = json.loads((short / "config.json").read_text(encoding="utf-8"))
    (short / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 40}), encoding="utf-8")
    (folder / "prompts.jsonl").write_text('{"text": "the cat"}', encoding="utf-8")
    assert run_json("bench short --draft none --repeats 1 --max-new-tokens 4 --prompts prompts.jsonl", capsys)["prompts"] == 1


def test_bench_compares_with_the_rates_of_the_readme() -> None:
    rows = re.findall(r"^\| (plain|plain \+ grammar|speculative|speculative \+ grammar) \| (\d+) \|", DOCUMENTS["README.md"], re.MULTILINE)
    assert {name: int(rate) for name, rate in rows} == bench.README_RATES


@pytest.mark.parametrize(
    ("arguments", "code", "messages"),
    [
        ("my_step:step --buffers my_step:buffers", 0, ["capturable on cpu", "buffers"]),
        ("wrong_steps:syncs --buffers my_step:buffers", 1, ["[host-sync]", "wrong_steps.py:5", "buffers.x.max().item()"]),
        ("wrong_steps:bakes --buffers my_step:buffers --between wrong_steps:again", 1, ["not capturable", "wrong_steps.py:9"]),
        ("wrong_steps:fails --buffers my_step:buffers", 1, ["the step failed", "wrong_steps.py:7", "KeyError: 'x'"]),
        ("wrong_steps:on_host --buffers my_step:buffers", 0, ["host nodes: waits; unchecked: whether they access device buffers"]),
        ("broken:make", 2, ["importing broken failed", "broken.py:2", "RuntimeError: no licence"]),
        ("needs:make", 2, ["importing needs failed", "there_is_no_such_package"]),
    ],
)
def test_capture_check_results_and_exit_codes(arguments: str, code: int, messages: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found, out, errors = run(f"capture-check {arguments}", capsys)
    assert found == code
    assert all(words in (errors if code else out) for words in messages), out + errors
    assert (out == "") == bool(code) and "Traceback" not in errors
    found, out, errors = run(f"capture-check {arguments} --json", capsys)
    assert (found, errors) == (code, "")
    assert json.loads(out)["capturable"] is (None if code == 2 else code == 0)


def test_baked_in_state_is_found_only_with_between(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("capture-check wrong_steps:bakes --buffers my_step:buffers", capsys)[0] == 0


@pytest.mark.parametrize(
    ("schema", "code", "cells", "summary"),
    [
        (SCHEMA, 0, [], "enforced by automaton: every keyword"),
        (
            {
                "properties": {
                    "b": {"minProperties": 2},
                    "d": {"format": "time"},
                    "e": {"type": "array", "uniqueItems": True, "items": {"enum": [*range(9)]}},
                }
            },
            0,
            [
                ["#/properties/b", "minProperties", "2", "narrowed", "at most one property that is not declared"],
                ["#/properties/d", "format", '"time"', "narrowed"],
                ["#/properties/e", "uniqueItems", "true", "narrowed"],
            ],
            "enforced by automaton; fewer texts are generated than the schema accepts",
        ),
        (
            {"properties": {"d": {"minProperties": 3, "type": "object"}, "n": {"not": {"propertyNames": {"format": "date"}}}}},
            1,
            [
                ["#/properties/d", "minProperties", "3", "refused", "two may have one name", "declare more of them"],
                [
                    "#/properties/n/not",
                    "not",
                    '{"propertyNames": {"format": "date"}}',
                    "refused",
                    "names of a format",
                    "write the properties out",
                ],
            ],
            "not enforced: 2 parts are refused",
        ),
        (
            {"properties": {"a": {"type": "string", "enum": [1]}}, "required": ["a"], "type": "object"},
            1,
            [
                [
                    "#/properties/a",
                    "schema",
                    '{"type": "string"',
                    "no value satisfies both",
                    "#/properties/a: enum",
                    "change one of its parts",
                ]
            ],
            "not enforced: 1 part is refused",
        ),
        (
            {"properties": {"a~b": {"type": "array", "uniqueItems": True}, "c": {"pattern": "(?<=a)b"}}},
            1,
            [
                ["#/properties/a~0b", "uniqueItems", "true", "refused", "is enforced for", "give items an enum"],
                ["#/properties/c", "pattern", '"(?<=a)b"', "refused", "use no look-behind and no flags"],
            ],
            "not enforced: 2 parts are refused",
        ),
        (
            {"$ref": "other.json"},
            1,
            [["#", "$ref", '"other.json"', "use a reference to a schema in the same document"]],
            "1 part is refused",
        ),
        ({"type": "object", "minProperties": {"a" * 99: "\x1b"}}, 1, [["#", "minProperties", "...", "use an integer in 0.."]], "refused"),
        (False, 1, [["#", "schema", "", "refused", "got false: no value satisfies it", "change one of its parts"]], "1 part is refused"),
    ],
)
def test_check_schema_results_and_exit_codes(
    schema: Any, code: int, cells: list[list[str]], summary: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "schema.json").write_text(json.dumps(schema), encoding="utf-8")
    found, out, errors = run("check-schema schema.json --objects standard", capsys)
    lines = out.splitlines()
    assert (found, errors) == (code, "")
    assert summary.replace("automaton", "xgrammar" if native.why_not() else "automaton") in lines[-1]
    assert len(lines) == 1 + (len(cells) + 1 if cells else 0)
    for line, words in zip(lines[1:], cells, strict=False):
        assert all(word in line for word in words), line
    document = json.loads(run("check-schema schema.json --objects standard --json", capsys)[1])
    assert document["enforced"] is (code == 0) and len(document["parts"]) == len(cells)
    assert all((part["value"] is None) == (schema is False) and part["suggestion"] for part in document["parts"])


def test_replay_results_and_exit_codes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json("replay toy.jsonl --model toy", capsys)
    assert found["equal"] and (found["requests"], found["tokens"], found["recorded_tokens"]) == (2, 24, 24)
    lines = (folder / "toy.jsonl").read_text().splitlines()
    index = next(index for index, line in enumerate(lines) if '"kind":"tokens"' in line)
    event = json.loads(lines[index])
    lines[index] = json.dumps(event | {"tokens": [event["tokens"][0] + 1, *event["tokens"][1:]]})
    (folder / "toy.jsonl").write_text("\n".join([*lines, ""]).replace('"python":"', '"python":"2.'))
    code, out, errors = run("replay toy.jsonl --model toy", capsys)
    assert code == terminal.FAILED
    first = event["tokens"][0]
    assert f"different: 1 requests; first job 1, position 0: got {first}, expected {first + 1}" in out and "recorded with 2." in errors
    code, out, errors = run("replay toy.jsonl --model toy --json", capsys)
    document = json.loads(out)
    assert (code, errors, document["equal"], len(document["other_versions"])) == (terminal.FAILED, "", False, 1)
    assert document["differences"] == [{"job_id": 1, "position": 0, "got": first, "expected": first + 1, "error": ""}]
