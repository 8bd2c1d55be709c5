"""README and docs: every Python block runs on its own, every command runs or at least parses, every link and test name exists."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgraph.graphs import BufferSpec, CaptureError, StaticBuffers, capture
from stepgraph.runtime import cli
from stepgraph.runtime.commands.flags import STEP_EXAMPLE
from tests.helpers.adapters import save_adapter
from tests.helpers.command_models import model_folder, model_gguf, recordings, tiny_model
from tests.helpers.documents import BLOCKS, COMMANDS, DOCUMENTS, ROOT, Block
from tests.helpers.tool_runs import parse_flags, run_tool

OUTPUTS = {  # pattern of the printed text, by a phrase of the block
    "Her name": r"[A-Z][a-z]{1,12}\n$",
    "attend(embed(buffers.token))": r"^1 \d+\n2 \d+\n3 \d+\n4 \d+\n5 \d+\n$",
    "class Recurrent": r"b'[a-z]{3,12}'\n$",
    "buffers.x.copy_(torch.tensor([0.0": r"tensor\(\[0\.00\d\d, 0\.0\d+, 0\.1\d+, 0\.8\d+\]\)\n$",
    "def add_one": r"tensor\(\[ 1\.,  4\.,  7\., 10\.\]\)\n$",
    "until=buffers.done": r"10 tensor\(\[1024\.\]\)\n$",
    "20\\d\\d-[01]\\d": r"b'20\d\d-[01]\d' (stop|constraint_complete)\n$",
    "AsyncEngine(engine)": r"b'",
    "engine.trace": r"target_verify",
    "class Person": r'\{"name": ?"([A-Z][a-z]{1,12})", ?"age": ?(\d+)\} \2\n$',
    "class Bigram": r"^\[(\d+, ){7}\d+\]\n$",
    "class Transformer": r"^\[(\d+, ){7}\d+\]\n$",
    "class Answer": r"^correct=(True|False)\n$",
    "weather\\((Oslo": r" [4-9]\d of \d+ tokens were cached\n$",
    "create_model": r"nights=\d+ breakfast=(True|False)\n$",
    "def continue_phrase": r" \d+ \d+\n$",
    "class RepeatLastToken": r" \d+ of 20 tokens were drafted\n$",
    "def weather": r"(Oslo|Rome): [123] days of rain\n$",
    "Once upon a time": r".",
    "Capital of Norway": r"\{.* (stop|constraint_complete|length)\n$",
    "engine.add_lora": r"\['sql'\] other tokens\n$",
    "save_hidden_states=": r"tensor\(2\) torch.Size\(\[9, \d+\]\)\n$",
    "engine.update_weights": r"^2 rollouts\n$",
    "number} + 1?": r"\[('.*', |\".*\", ){7}",
    "def no_repeats": r"^True\n$",
    "resume_from=first.tokens": r"(^|\n)[5-7] 1\d ",
}


PERSON = {"type": "object", "properties": {"name": {"enum": ["Ada"]}}, "required": ["name"], "additionalProperties": False}
EXECUTED = {  # documented command: the command that runs in a temporary folder, with its file names and with flags that shorten the run
    "python tools/gpu_check.py": "python tools/gpu_check.py --list",
    "python tools/gpu_table.py --write": "python tools/gpu_table.py --check",  # does not write into the repository
    "python -m tools.first_hour --lines": "python -m tools.first_hour --lines",
    "python -m tools.error_index --write": "python -m tools.error_index",
    "python tools/nsys_profile.py --rounds 20-40 --out /tmp/bench --bench": "python tools/nsys_profile.py --rounds 20-40 --bench --print",
    "python tools/nsys_profile.py --rounds 100-200 --out /tmp/mine -- serve.py --port 8000": (
        "python tools/nsys_profile.py --rounds 100-200 --out /tmp/mine --print -- serve.py --port 8000"
    ),
    "python tools/train_head.py --target model --kind eagle3 --data prompts.jsonl --answers 256 --draft-vocab 4096 --out head": (
        "python tools/train_head.py --target model --kind eagle3 --data prompts.jsonl --answers 4 --draft-vocab 128 --out head"
        " --steps 1 --batch-tokens 32 --ttt-steps 1 --report-texts 1 --report-tokens 4 --eval-share 0.5 --quiet"
    ),
    "stepgraph capture-check my_step:make --replay": "stepgraph capture-check my_step:make --replay",
    "stepgraph check-schema person.json": "stepgraph check-schema person.json",
    'stepgraph generate MODEL "Ada is 36" --schema person.json --draft ngram -k 4': (
        'stepgraph generate model "Ada is 36" --schema person.json --draft ngram -k 4'
    ),
    "stepgraph generate MODEL PROMPT --stop TEXT": 'stepgraph generate model "the cat" --stop x --max-new-tokens 4',
    "stepgraph inspect MODEL": "stepgraph inspect model",
    "stepgraph replay run.jsonl --model MODEL": "stepgraph replay run.jsonl --model model",
    "stepgraph replay run.jsonl --model MODEL --draft DRAFT": "stepgraph replay run.jsonl --model model --draft ngram",
}
PARSED = {  # the others, and why they do not run here
    "make bench": "minutes long",
    "make browser": "needs a browser",
    "make demo": "installs packages",
    "make lint": "installs packages",
    "make models": "installs packages",
    "make replicas": "installs packages",
    "make no-compiler": "minutes long",
    "stepgraph serve model --replicas 4": "tests/runtime/replicas/test_command.py runs it",
    "make sanitize": "minutes long",
    "make slow": "minutes long",
    "make soak": "minutes long",
    "make soak MINUTES=20": "minutes long",
    "make stub-cuda": "installs packages",
    "make stub-cuda-versions": "installs packages",
    "make test": "runs this test",
    "python tools/bench_parallel.py MODEL --ranks 2": "tests/tools/bench/test_bench_parallel.py runs it",
    "python -m pytest -m stub_cuda tests/stub_cuda": "needs a CUDA build of torch",
    "python -m tools.bench_grammar --rows 1 64 --rounds 1600 --library xgrammar llguidance": "minutes long",
    "python -m tests.helpers.architecture --write": "tests/test_architecture.py compares what it writes",
    "python -m tests.helpers.long_runs formats --json FILE": "minutes long; test_formats.py runs its parts",
    "python -m tests.helpers.long_runs masks --json FILE": "minutes long; tests/laws/test_draft_chains.py runs its parts",
    "python -m tools.operations --write": "tests/tools/test_operations.py compares what it writes",
    "stepgraph bench MODEL --draft path/to/head": "tests/runtime/commands/test_commands.py runs it",
    "stepgraph demo": "tests/runtime/commands/test_demo.py runs it",
    "stepgraph doctor": "tests/runtime/commands/test_doctor.py runs it",
    "python -m tests.fuzz": "tests/laws/test_fuzz.py runs it",
    "python -m tools.gpu.packing.triton_cache --out cache": "needs a CUDA build of torch; tests/stub_cuda runs it",
    "python -m tools.first_hour": "installs the package; tests/tools runs it (make models)",
    "python -m tools.soak": "tests/laws/test_soak.py runs it",
    "python -m tools.soak --minutes 20 --out soak.json": "tests/laws/test_soak.py runs it",
    "python bundle/install.py": "needs a GPU host and a bundle",
    "python tools/bench_adaptive.py --demo": "needs the demonstration's model",
    "python tools/bench_demo.py": "needs the demonstration's model",
    "python tools/bench_demo.py --acceptance 20": "needs the demonstration's model",
    "python tools/bench_demo.py --grammar-rounds 1000": "needs the demonstration's model",
    "python tools/bench_demo.py --hidden 200": "needs the demonstration's model",
    "python tools/gpu_pack.py --out bundle": "downloads wheels",
    "python tools/nsys_report.py /tmp/bench.rounds.json --png timeline.png": "tests/tools/profiling runs it",
    "stepgraph serve MODEL": "a server; tests/runtime/serve starts it",
    "stepgraph serve MODEL --draft ngram -k 4": "a server; tests/runtime/serve starts it",
    "python tools/trace_picture.py rounds.json rounds.png": "tests/tools/profiling runs it",
    "python tools/trace_picture.py rounds.json lengths.png --lengths": "tests/tools/profiling runs it",
}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_python_block_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").symlink_to(model_folder())
    if "model.gguf" in block.text:
        (tmp_path / "model.gguf").symlink_to(model_gguf())
    if "adapters/sql" in block.text:
        (tmp_path / "adapters").mkdir()
        save_adapter(tmp_path / "adapters" / "sql", tiny_model(), 8)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    exec(compile(block.text, str(block), "exec"), {"__name__": "documentation"})
    expected = [pattern for phrase, pattern in OUTPUTS.items() if phrase in block.text]
    assert expected, "no expected output is listed for this block"
    printed = capsys.readouterr().out
    assert all(re.search(pattern, printed) for pattern in expected), printed


@pytest.mark.parametrize(("block", "most"), [("README.md-1", 10), ("docs/json.md-1", 5)])
def test_first_examples_are_short(block: str, most: int) -> None:
    (text,) = (found.text for found in BLOCKS if str(found) == block)
    assert len([line for line in text.splitlines() if line.strip()]) <= most


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The files that the commands name, in the current folder."""
    (tmp_path / "model").symlink_to(model_folder())
    (tmp_path / "run.jsonl").write_bytes((recordings() / "run.jsonl").read_bytes())
    (tmp_path / "my_step.py").write_text(STEP_EXAMPLE, encoding="utf-8")
    (tmp_path / "person.json").write_text(json.dumps(PERSON), encoding="utf-8")
    prompts = (f'{{"token_ids": [{first}, 2, 3]}}\n' for first in range(4, 12))
    (tmp_path / "prompts.jsonl").write_text("".join(prompts), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_step", None)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("command", EXECUTED)
def test_command_runs(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(EXECUTED[command])
    if words[0] == "stepgraph":
        code: object = cli.main(words[1:])
    else:
        with pytest.raises(SystemExit) as ended:
            run_tool(*tool_and_flags(words[1:]), monkeypatch)
        code = ended.value.code
    printed, errors = capsys.readouterr()
    assert code in (0, None), errors
    assert printed.strip() or "--check" in words


def test_every_command_is_listed() -> None:
    assert sorted(EXECUTED | PARSED) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_accepted(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make targets exist, flags of commands and tools parse. The examples of every --help run in other tests."""
    words = shlex.split(command)
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert words[1] in re.findall(r"^([\w-]+):", makefile, re.MULTILINE)
        assert all(f"$({word.split('=')[0]})" in makefile for word in words[2:])
    elif words[0] == "stepgraph":
        cli.make_parser().parse_args(words[1:])
    elif "pytest" in words:
        assert (ROOT / words[-1]).is_dir()
    elif not any(longer.startswith(f"{command} -") for longer in COMMANDS):  # else it only names a tool
        parse_flags(*tool_and_flags(words[1:]), monkeypatch)


def tool_and_flags(words: list[str]) -> tuple[Path, list[str]]:
    """words: after `python`."""
    if words[0] == "-m":
        module = ROOT / words[1].replace(".", "/")
        return module / "__main__.py" if module.is_dir() else module.with_suffix(".py"), words[2:]
    # bundle/install.py is a copy that tools/gpu_pack.py makes
    return ROOT / ("tools/gpu/packing/unpack.py" if words[0] == "bundle/install.py" else words[0]), words[1:]


def test_error_shown_in_the_documentation_is_raised() -> None:
    buffers = StaticBuffers([BufferSpec("x", (4,), torch.float32)])

    def step(buffers: StaticBuffers) -> None:
        buffers.x.mul_(buffers.x.max().item())

    with pytest.raises(CaptureError) as caught:
        capture(step, buffers, backend="tape")
    found = re.search(r"CaptureError: \[([\w-]+)\] (.*)", DOCUMENTS["docs/capture.md"])
    assert found is not None
    assert caught.value.rule == found[1]
    assert found[2] in str(caught.value)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_linked_files_and_named_tests_exist(document: str) -> None:
    text = DOCUMENTS[document]
    for name in re.findall(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)", text):
        assert (ROOT / "tests" / name).exists(), name
    for path, anchor in re.findall(r"\]\(([\w/.-]*)(?:#([\w-]+))?\)", text):
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), path
        headings = re.findall(r"(?m)^#+ (.*)$", target.read_text(encoding="utf-8")) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], (
            f"{path}#{anchor}"
        )


def test_blocks_do_not_import_private_names() -> None:
    for block in BLOCKS:
        assert not re.search(r"import _|\._[a-z]", block.text.replace("self._", "")), block


def test_public_names_are_importable_from_the_package_root() -> None:
    assert "torch" in sys.modules
    import stepgraph

    values: list[Any] = [getattr(stepgraph, name) for name in stepgraph.__all__]
    assert all(value is not None for value in values)
