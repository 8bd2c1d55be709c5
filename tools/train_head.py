"""Train an EAGLE-3 head or an MTP head for a target, from texts or from hidden states that an engine saved.

    python tools/train_head.py --target folder --kind eagle3 --data texts.jsonl --out head --draft-vocab 2048
    python tools/train_head.py ... --resume     continue an interrupted run; bit exact if nothing else changed

The target processes each text once. Lines of a .jsonl file have one of "text", "messages" and "token_ids". With --answers N the
target first answers each of them in at most N tokens, and the head is trained on the answers, which are what it will draft.
Prints times and acceptance as one JSON document last. Ctrl-C saves a checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

INTERRUPTED = 130


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", type=Path, required=True, metavar="PATH", help="the target: a Hugging Face folder or a .gguf file")
    add("--kind", choices=("eagle3", "mtp"), required=True, help="eagle3, or mtp: one module, used for every draft")
    add("--data", type=Path, required=True, metavar="PATH", help="a .txt or .jsonl file, or a folder of save_hidden_states")
    add("--out", type=Path, required=True, metavar="FOLDER", help="output folder; checkpoints go to FOLDER/training")
    add("--draft-vocab", type=int, metavar="N", help="tokens that the head may propose, by frequency (default: 8192, or all)")
    add("--intermediate-size", type=int, metavar="N", help="width of the head's perceptron (default: the target's)")
    add("--steps", type=int, default=600, metavar="N", help="training steps (default: %(default)s)")
    add("--batch-tokens", type=int, default=2048, metavar="N", help="tokens of a batch, in whole texts (default: %(default)s)")
    add("--max-length", type=int, default=512, metavar="N", help="token limit of a text, or of a prompt to answer (default: %(default)s)")
    add("--lr", type=float, default=1e-3, metavar="X", help="peak learning rate (default: %(default)s)")
    add("--ttt-steps", type=int, default=4, metavar="N", help="length of the draft chains in training, 1 to 8 (default: %(default)s)")
    add("--answers", type=int, default=0, metavar="N", help="train on answers of the target to the texts, of at most N tokens")
    add("--temperature", type=float, default=0.7, metavar="X", help="temperature of these answers (default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cpu or cuda (default: %(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of matrix products in training (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of initial weights, order and split (default: %(default)s)")
    add("--eval-share", type=float, default=0.05, metavar="X", help="held-out share of the texts (default: %(default)s)")
    add("--report-texts", type=int, default=16, metavar="N", help="held-out texts that the final report decodes (default: %(default)s)")
    add("--report-tokens", type=int, default=64, metavar="N", help="tokens of each (default: %(default)s)")
    add("--save-every", type=int, default=50, metavar="N", help="steps between two checkpoints (default: %(default)s)")
    add("--resume", action="store_true", help="continue the training in --out")
    add("--quiet", action="store_true", help="no progress bars")
    return parser.parse_args(arguments)


def check(options: argparse.Namespace) -> None:
    """Raise a ValueError that names the flag, before any file is read or written."""
    for flag, least, most in (
        ("draft-vocab", 1, 1 << 24),
        ("intermediate-size", 1, 1 << 20),
        ("steps", 1, 1 << 40),
        ("batch-tokens", 3, 1 << 30),
        ("max-length", 3, 1 << 20),
        ("ttt-steps", 1, 8),
        ("answers", 0, 1 << 20),
        ("report-texts", 1, 1 << 20),
        ("report-tokens", 1, 1 << 20),
        ("save-every", 1, 1 << 40),
        ("seed", 0, 1 << 40),
    ):
        value = getattr(options, flag.replace("-", "_"))
        if value is not None and not least <= value <= most:
            raise ValueError(f"--{flag}: got {value}, expected a whole number from {least} to {most}")
    for flag, maximum in (("lr", 1.0), ("eval-share", 0.9)):
        number = getattr(options, flag.replace("-", "_"))
        if not 0 < number <= maximum:
            raise ValueError(f"--{flag}: got {number}, expected more than 0, at most {maximum:g}")
    if not 0 <= options.temperature <= 10:
        raise ValueError(f"--temperature: got {options.temperature}, expected a number from 0 to 10")
    if not options.data.exists():
        raise ValueError(f"--data: {options.data} does not exist")
    work = options.out / "training"
    if options.resume and not work.is_dir():
        raise ValueError(f"--resume: {options.out} has no training to resume")
    if not options.resume and options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise ValueError(f"--out: {options.out} is not an empty folder; expected a new one, or --resume")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        check(options)
        from tools.train.command import run  # after the flags are checked: importing torch takes seconds

        return run(options)
    except ValueError as error:
        print(f"train_head: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train_head: interrupted; continue with --resume", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
