"""The work of tools/train_head.py after its flags are checked: states, head, training, report."""

from __future__ import annotations

import argparse
import json
import signal
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from stepgraph.runtime.models.files.checkpoint import Checkpoint, open_checkpoint
from stepgraph.runtime.models.llama import Llama
from tools.train.acceptance import measure
from tools.train.batches import TrainingSet
from tools.train.collect import check_states, save_answers, save_states
from tools.train.heads import Head, default_feature_layers
from tools.train.plan import TrainingPlan
from tools.train.saved_states import SavedStates
from tools.train.texts import read_texts
from tools.train.trainer import Trainer
from tools.train.vocabulary import check_draft_vocab, choose_proposed

DEFAULT_DRAFT_VOCAB = 8192  # default of --draft-vocab


def run(options: argparse.Namespace) -> int:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device: torch {torch.__version__} sees no GPU here, expected cpu")
    started = time.perf_counter()
    progress, work = not options.quiet, options.out / "training"
    checkpoint = open_checkpoint(options.target)
    if not checkpoint.config.has_llama_layers:
        raise ValueError(f"--target: got {str(options.target)!r}, expected a model whose layers are those of a Llama")
    positions, num_tokens = checkpoint.config.max_positions, len(checkpoint.vocabulary.tokens)
    check_positions(options, positions)
    count = min(DEFAULT_DRAFT_VOCAB, num_tokens) if options.draft_vocab is None else options.draft_vocab
    check_draft_vocab(checkpoint.vocabulary, count)
    layers = feature_layers(options, checkpoint)
    target = checkpoint.load(f"{options.device}:0" if options.device == "cuda" else "cpu", layers, progress)
    work.mkdir(parents=True, exist_ok=True)
    states = training_states(options, checkpoint, target)
    plan = TrainingPlan(
        kind=options.kind,
        draft_vocab=options.draft_vocab,
        steps=options.steps,
        batch_tokens=options.batch_tokens,
        rate=options.lr,
        unrolled=options.ttt_steps,
        dtype=options.dtype,
        seed=options.seed,
        eval_share=options.eval_share,
        longest=options.max_length + options.answers,
        middle=options.intermediate_size,
    )
    data = TrainingSet(states, target, plan)
    data.prepare(work / "predictions.safetensors", num_tokens, progress)
    d2t = choose_proposed(data.frequencies(), checkpoint.vocabulary, count)
    head = Head(options.kind, target, d2t, layers, options.seed, options.intermediate_size)
    trainer = Trainer(head, data, plan)
    checkpoint_path = work / "checkpoint.safetensors"
    if options.resume and checkpoint_path.exists():
        trainer.resume(checkpoint_path)
    resumed_at, training_started = trainer.step, time.perf_counter()
    if not train(trainer, checkpoint_path, options.save_every, progress):
        raise KeyboardInterrupt
    speed = trainer.trained_tokens / (time.perf_counter() - training_started)
    head.save(options.out)
    document: dict[str, Any] = {
        "plan": asdict(plan),
        "target": options.target.name,
        "feature_layers": list(layers),
        "proposed": len(d2t),
        "parameters": sum(parameter.numel() for parameter in head.parameters.values()),
        "trained": {"steps": trainer.step, "resumed_at": resumed_at},
        "texts": {"learned": len(data.training), "held_out": len(data.held_out)},
        "held_out": trainer.evaluate(),
        "tokens_per_second": round(speed, 1),
    }
    if options.kind == "mtp":  # an MTP head reads the hidden states only
        target.feature_layers, target.feature_size = (), target.hidden_size
    prompts = data.prompts(options.report_texts, min(options.max_length, positions - options.report_tokens))
    acceptance = (
        measure(target, head.drafter(), checkpoint.vocabulary, prompts, k, options.report_tokens) for k in range(1, options.ttt_steps + 1)
    )
    document |= {"acceptance": list(acceptance), "example": prompts[0], "seconds": round(time.perf_counter() - started, 1)}
    (work / "report.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 0


def train(trainer: Trainer, checkpoint: Path, every: int, progress: bool) -> bool:
    """Train to the end or to the first Ctrl-C, which completes the current step; a second one interrupts it."""
    requested: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if requested:
            signal.default_int_handler(number, frame)
        requested.append(number)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        return trainer.train(checkpoint, every, progress, stop=lambda: bool(requested))
    finally:
        signal.signal(signal.SIGINT, before)


def check_positions(options: argparse.Namespace, positions: int) -> None:
    """Check that prompts and answers fit into the target's positions."""
    for flag, value in (("answers", options.answers), ("report-tokens", options.report_tokens)):
        if value >= positions:
            raise ValueError(f"--{flag}: got {value}, expected fewer than the target's {positions} positions")


def feature_layers(options: argparse.Namespace, checkpoint: Checkpoint) -> tuple[int, ...]:
    """Feature layers: those of the saved states, otherwise the defaults. None for an MTP head."""
    if not options.data.is_dir():
        return default_feature_layers(checkpoint.config.num_layers) if options.kind == "eagle3" else ()
    layout = SavedStates(options.data).layout
    if options.kind == "mtp":
        return layout.feature_layers  # to compare the states with the target
    if not layout.feature_layers:
        raise ValueError(f"--data: {options.data} has no layer input states; save them with Engine(feature_layers=...) for an eagle3 head")
    return layout.feature_layers


def training_states(options: argparse.Namespace, checkpoint: Checkpoint, target: Llama) -> SavedStates:
    """The training states: saved ones, or those of texts."""
    progress, folder = not options.quiet, options.out / "training" / "states"
    if options.data.is_dir():
        states = SavedStates(options.data)
        check_states(states, target)
        return states
    num_tokens, will_answer = len(checkpoint.vocabulary.tokens), options.answers > 0
    longest = min(options.max_length, checkpoint.config.max_positions - options.answers)
    texts = read_texts(options.data, options.target, num_tokens, longest, will_answer)
    if will_answer:
        prompts = dict.fromkeys(text.token_ids for text in texts)
        return save_answers(target, checkpoint.vocabulary, prompts, options.answers, options.temperature, folder, progress)
    return save_states(target, texts, folder, progress)
