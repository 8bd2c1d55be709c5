"""Train the demonstration's draft: an EAGLE-3 head for SmolLM2-135M-Instruct, on that model's answers to generated prompts.

    python tools/train_demo.py --work folder            answers, training, measuring, card; hours on a CPU
    python tools/train_demo.py --work folder --install  the same, and copy the head into runtime/demo/head

Every part can be resumed: existing answers in --work are kept, and training continues from its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

from tools import train_head

MAX_HEAD_BYTES = 6_500_000  # of the head in 8 bits, in a wheel


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--work", type=Path, required=True, metavar="FOLDER", help="folder for answers, checkpoints and the head; some gigabytes")
    add("--prompts", type=int, default=3000, metavar="N", help="prompts to generate, including duplicates (default: %(default)s)")
    add("--answers", type=int, default=112, metavar="N", help="token limit of an answer (default: %(default)s)")
    add("--steps", type=int, default=3000, metavar="N", help="training steps (default: %(default)s)")
    add("--draft-vocab", type=int, default=2944, metavar="N", help="tokens that the head may propose (default: %(default)s)")
    add("--intermediate-size", type=int, default=1024, metavar="N", help="width of its perceptron (default: %(default)s)")
    add("--lr", type=float, default=1e-3, metavar="X", help="peak learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of initial weights, order and split (default: %(default)s)")
    add("--measured", type=int, default=20, metavar="N", help="prompts of each kind to measure on (default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="device for training (default: %(default)s)")
    add("--install", action="store_true", help="copy the head into the package")
    add("--quiet", action="store_true", help="no progress bars")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    from stepgraph.runtime.demo.pair import HEAD_FOLDER, target_path
    from tools.train.demo.card import card
    from tools.train.demo.collect import save_demo_answers
    from tools.train.demo.measure import measure
    from tools.train.quantised import quantise_head

    target, states, trained, head = target_path(), options.work / "states", options.work / "trained", options.work / "head"
    options.work.mkdir(parents=True, exist_ok=True)
    save_demo_answers(target, states, options.prompts, options.answers, not options.quiet)
    code = train_head.main(training_flags(options, target, states, trained))
    if code:
        return code
    quantise_head(trained, head)
    weight = (head / "model.safetensors").stat().st_size
    if weight > MAX_HEAD_BYTES:
        raise ValueError(f"{head}: got {weight:,} bytes, expected at most {MAX_HEAD_BYTES:,}; lower --draft-vocab or --intermediate-size")
    report = {
        "command": command_line(options),
        "answers": options.answers,
        "bytes": weight,
        "training": json.loads((trained / "training" / "report.json").read_text(encoding="utf-8")),
        "measured": measure(target, head, options.measured, not options.quiet),
    }
    (options.work / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (options.work / "README.md").write_text(card(report), encoding="utf-8")
    if options.install:
        install(options.work, head, HEAD_FOLDER)
    print(json.dumps(report))
    return 0


def training_flags(options: argparse.Namespace, target: Path, states: Path, head: Path) -> list[str]:
    """The flags for tools/train_head.py."""
    flag_values: dict[str, Any] = {
        "target": target,
        "kind": "eagle3",
        "data": states,
        "out": head,
        "steps": options.steps,
        "draft-vocab": options.draft_vocab,
        "intermediate-size": options.intermediate_size,
        "lr": options.lr,
        "seed": options.seed,
        "device": options.device,
        "dtype": "bfloat16",
        "report-texts": 8,
        "report-tokens": 32,
    }
    flags = [part for name, value in flag_values.items() for part in (f"--{name}", str(value))]
    return flags + ["--resume"] * (head / "training").is_dir() + ["--quiet"] * options.quiet


def command_line(options: argparse.Namespace) -> str:
    """The command line that makes this head again."""
    names = ("prompts", "answers", "steps", "draft_vocab", "intermediate_size", "lr", "seed")
    return "python tools/train_demo.py --work folder " + " ".join(f"--{name.replace('_', '-')} {getattr(options, name)}" for name in names)


def install(work: Path, head: Path, index: Path) -> None:
    index.mkdir(exist_ok=True)
    for file in (work / "README.md", head / "config.json", head / "model.safetensors"):
        shutil.copyfile(file, index / file.name)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        return run(options)
    except ValueError as error:
        print(f"train_demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train_demo: interrupted; run the same command to continue", file=sys.stderr)
        return train_head.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
