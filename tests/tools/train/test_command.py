"""Training texts, the tokens that a head proposes, and tools/train_head.py as a command."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from stepgraph import Engine, EngineConfig, Vocabulary
from stepgraph.runtime.hidden_states import SavedText, StatesLayout, StatesWriter
from tests.helpers.families import folder_of
from tools import train_head
from tools.train.batches import TrainingSet
from tools.train.texts import Text, read_texts
from tools.train.vocabulary import always_proposed, choose_proposed

START, STOP = 95, 96
ROOT = Path(__file__).resolve().parent.parent.parent.parent
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}:{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


def model_folder(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A tiny target with a tokenizer."""
    shutil.copytree(folder_of("llama-3.1", lean=True), folder)
    letters = {letter: index for index, letter in enumerate([*map(chr, range(0x21, 0x7F)), "Ġ"])}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": STOP}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model") / "target")


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def spelled(text: str) -> list[int]:
    return [94 if letter == " " else ord(letter) - 0x21 for letter in text]


def test_texts_of_every_kind(target: Path, tmp_path: Path) -> None:
    ids, empty = {"token_ids": [5, 6, 7, 8], "prompt_length": 2, "note": "a\u2028b"}, {"token_ids": list[int]()}
    question, will_answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo!"}
    data = write(tmp_path / "data.jsonl", ids, empty, {"text": "a b"}, {"messages": [question, will_answer]}, {"messages": [question]})
    prompt = [START, *spelled("user:hi"), STOP, START, *spelled("assistant:")]
    whole = [*prompt, *spelled("yo!"), STOP]
    assert read_texts(data, target, 160, 100) == [
        Text((5, 6, 7, 8), 2),
        Text(tuple(spelled("a b")), 1),
        Text(tuple(whole), len(prompt)),
        Text(tuple(prompt), len(prompt)),
    ]
    assert read_texts(data, target, 160, 100, will_answer=True)[1:] == [
        Text(tuple(spelled("a b")), 3),
        *[Text(tuple(prompt), len(prompt))] * 2,
    ]
    plain = tmp_path / "data.txt"
    plain.write_text("abcdefgh")
    assert [text.token_ids for text in read_texts(plain, target, 160, 5)] == [tuple(spelled("abcde")), tuple(spelled("fgh"))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 3}', r"data.jsonl:2: text: got 3, expected a string"),
        ('{"text": "a", "token_ids": []}', r"data.jsonl:2: got .*, expected an object with one of text, messages, token_ids"),
        ("[1]", r"data.jsonl:2: got '\[1\]', expected an object with one of"),
        ('{"text', r"data.jsonl:2: not JSON"),
        pytest.param(f'{{"token_ids": [{"1" * 5000}]}}', r"data.jsonl:2: not JSON: Exceeds the limit", id="digits"),
        ('{"messages": []}', r"data.jsonl:2: messages: got \[\], expected a list of objects with role and content"),
        (
            '{"messages": [{"role": "user", "content": "hi"}]}',
            r"data.jsonl:2: messages: got a conversation for a model without chat template, expected a plain prompt or token ids",
        ),
        ('{"token_ids": [1, 2.5]}', r"data.jsonl:2: token_ids: got \[1, 2.5\], expected a list of whole numbers"),
        ('{"token_ids": [1, 2, 160]}', r"data.jsonl:2: token_ids: got 160, expected ids from 0 to 159"),
        ('{"token_ids": [1, 2], "prompt_length": 3}', r"data.jsonl:2: prompt_length: got 3, expected a whole number from 0 to 2"),
    ],
)
def test_bad_lines_are_refused_with_their_number(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, line: str, message: str) -> None:
    bare = tmp_path_factory.getbasetemp() / "bare"
    if not bare.exists():
        model_folder(bare, template=None)
    data = tmp_path / "data.jsonl"
    data.write_text('{"token_ids": [1, 2, 3]}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_texts(data, bare, 160, 100)


def test_stop_ids_and_ascii_are_always_proposed() -> None:
    vocabulary = Vocabulary([b"</s>", b"a", b"the", b"{", b"7", b"7", b"\xff", b" end", b"\n", b"."], stop_token_ids=[0])
    assert always_proposed(vocabulary) == [0, 1, 3, 4, 8, 9]
    frequencies = torch.tensor([0, 0, 5, 0, 0, 0, 9, 5, 0, 0, 99])  # the last logit is padding
    assert choose_proposed(frequencies, vocabulary, 8).tolist() == [0, 1, 2, 3, 4, 6, 8, 9]
    assert choose_proposed(frequencies, vocabulary, None).tolist() == list(range(10))
    with pytest.raises(
        ValueError, match="--draft-vocab: got 5, expected 6, for stop ids and single characters, to 10, the target's tokens"
    ):
        choose_proposed(frequencies, vocabulary, 5)


def process(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "train_head.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def flags(target: Path, tmp_path: Path) -> dict[str, Any]:
    made = torch.Generator().manual_seed(4)
    prompts = [{"token_ids": torch.randint(4, 90, (3,), generator=made).tolist()} for _ in range(24)]
    data = write(tmp_path / "prompts.jsonl", *prompts)
    return {"target": target, "kind": "eagle3", "data": data, "out": tmp_path / "out"}


def listed(flags: dict[str, Any], *more: object) -> list[str]:
    return [str(each) for name, value in flags.items() for each in (f"--{name}", value)] + [str(each) for each in more]


def test_wrong_flags_exit_with_2(flags: dict[str, Any], tmp_path: Path) -> None:
    assert "--ttt-steps" in process("--help").stdout
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    for change, more, message in (
        ({"kind": "medusa"}, (), "invalid choice: 'medusa'"),
        ({"data": tmp_path / "no.txt"}, (), "train_head: --data: " + str(tmp_path / "no.txt") + " does not exist"),
        ({"out": full}, (), "full is not an empty folder; expected a new one, or --resume"),
        ({}, ("--resume",), "out has no training to resume"),
        ({}, ("--ttt-steps", 9), "train_head: --ttt-steps: got 9, expected a whole number from 1 to 8"),
        ({}, ("--lr", "nan"), "train_head: --lr: got nan, expected more than 0, at most 1"),
        ({}, ("--seed", 1 << 64), "train_head: --seed: got 18446744073709551616, expected a whole number from 0 to 1099511627776"),
        ({}, ("--temperature", -1), "train_head: --temperature: got -1.0, expected a number from 0 to 10"),
    ):
        result = process(*listed({**flags, **change}, *more))
        assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr, result.stderr
    assert not (tmp_path / "out").exists()


def test_wrong_data_is_refused(flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, strange = tmp_path / "empty.jsonl", tmp_path / "data.csv"
    empty.write_text("\n")
    strange.touch()
    one = write(tmp_path / "one.jsonl", {"token_ids": [5, 6, 7, 8]})
    for index, (data, message) in enumerate(
        (
            (empty, "empty.jsonl: got 0 texts of at least 3 tokens, expected at least one"),
            (strange, "data.csv: got the ending '.csv', expected .txt, .jsonl, or a folder of saved hidden states"),
            (tmp_path, "expected a folder written by EngineConfig.save_hidden_states"),
            (one, "texts to learn from and "),
        )
    ):
        assert train_head.main(listed({**flags, "data": data, "out": tmp_path / str(index)}, "--quiet")) == 2
        assert message in capsys.readouterr().err


SHORT = ("--draft-vocab", 96, "--batch-tokens", 128, "--ttt-steps", 2, "--eval-share", 0.3, "--report-texts", 2, "--report-tokens", 16)


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("mtp", marks=pytest.mark.soak)])
def test_train_from_prompts_and_load_in_an_engine(
    flags: dict[str, Any], kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Interrupt in step four, resume, report, and load the head in an engine."""
    flags["kind"] = kind
    steps = ("--answers", 12, "--temperature", 0, "--steps", 8, "--lr", 3e-3, *SHORT, "--quiet")
    whole = TrainingSet.shuffled_batches

    def interrupted(data: TrainingSet) -> Iterator[list[int]]:
        for index, group in enumerate(whole(data)):
            if index == 3:
                signal.raise_signal(signal.SIGINT)
            yield group

    monkeypatch.setattr(TrainingSet, "shuffled_batches", interrupted)
    assert train_head.main(listed(flags, *steps)) == 130
    assert "interrupted; continue with --resume" in capsys.readouterr().err
    monkeypatch.undo()
    assert train_head.main(listed(flags, *steps, "--resume")) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["trained"] == {"steps": 8, "resumed_at": 4} and [each["drafts"] for each in document["acceptance"]] == [1, 2]
    assert document == json.loads((flags["out"] / "training" / "report.json").read_text())
    config = EngineConfig(max_rows=1, num_speculative_tokens=2, draft_length=2, max_length=64, greedy_only=True, eager=True)
    prompt = document["example"]
    with Engine.from_pretrained(flags["target"], flags["out"], config=config) as engine:
        job = engine.generate(prompt, max_new_tokens=24)
    plain = EngineConfig(max_rows=1, num_speculative_tokens=0, max_length=64, greedy_only=True, eager=True)
    with Engine.from_pretrained(flags["target"], config=plain) as engine:
        assert engine.generate(prompt, max_new_tokens=24).tokens == job.tokens


def test_texts_as_long_as_the_position_limit(flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Positions are not a multiple of the page size; prompts are cut to leave room for answers."""
    small = Path(shutil.copytree(flags["target"], tmp_path / "small"))
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    texts = [{"token_ids": [index + 4, *range(5, 65)], "prompt_length": 38} for index in range(12)]
    flags |= {"target": small, "data": write(tmp_path / "long.jsonl", *texts)}
    for flag, value, message in (
        ("report-tokens", 40, "--report-tokens: got 40, expected fewer than the target's 40 positions"),
        ("answers", 41, "--answers: got 41, expected fewer than the target's 40 positions"),
        ("draft-vocab", 95, "--draft-vocab: got 95, expected 96, for stop ids"),
    ):
        assert train_head.main(listed(flags, *SHORT, f"--{flag}", value)) == 2 and message in capsys.readouterr().err
        assert not flags["out"].exists()
    for index, (answers, most) in enumerate(((0, 512), (8, 512), (8, 24))):
        once = ("--steps", 1, *SHORT, "--ttt-steps", 1, "--answers", answers, "--max-length", most, "--quiet")
        assert train_head.main(listed({**flags, "out": tmp_path / str(index)}, *once)) == 0
        document = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert len(document["example"]) == 24 and document["acceptance"][0]["greedy"]["rounds"] > 0
        assert document["held_out"]["losses"][0] > 0  # a cut prompt leaves room for its answer


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("mtp", marks=pytest.mark.soak)])
def test_train_from_saved_hidden_states(flags: dict[str, Any], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """States of another model are refused."""
    flags |= {"kind": kind, "data": tmp_path / "states"}
    config = EngineConfig(
        max_rows=4, num_speculative_tokens=0, max_length=64, greedy_only=True, eager=True, save_hidden_states=flags["data"]
    )
    with Engine.from_pretrained(flags["target"], config=config, feature_layers=(1, 2, 4)) as engine:
        engine.capture()
        for token in range(12):
            engine.submit([token + 20, 30], max_new_tokens=10)
        assert sum(event.finish_reason is not None for event in engine.stream()) == 12
    assert train_head.main(listed(flags, "--steps", 2, *SHORT, "--quiet")) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["feature_layers"] == [1, 2, 4]
    other = {**flags, "target": folder_of("llama-2"), "out": tmp_path / "other"}
    assert train_head.main(listed(other, "--steps", 2, *SHORT, "--quiet")) == 2
    assert "off, expected states of this target" in capsys.readouterr().err


def test_states_without_features_are_refused_for_eagle3(flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = StatesWriter(tmp_path / "states", StatesLayout("target", 160, (), 0, 64, "float32"), 1 << 20)
    writer.put(SavedText(torch.arange(4), 1, *[torch.zeros(3, 64)] * 2))
    writer.close()
    assert train_head.main(listed({**flags, "data": tmp_path / "states"}, "--quiet")) == 2
    assert "has no layer input states; save them with Engine(feature_layers=...)" in capsys.readouterr().err
