"""Train an EAGLE-3 head or an MTP head for a target, from texts or from hidden states that an engine saved.

    python tools/train_head.py --target folder --kind eagle3 --data texts.jsonl --out head --draft-vocab 2048
    python tools/train_head.py ... --resume     go on where the last run ended; bit for bit where nothing else changed

Texts are run through the target once. Lines of a .jsonl file hold one of "text", "messages" and "token_ids". With --answers N the
target answers each of them first, in at most N tokens, and the head learns from that: it will be asked to foresee just such texts.
What it took and how often the drafts hold is printed as one JSON document, last. Interrupted, it saves where it is.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

INTERRUPTED = 130


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", type=Path, required=True, metavar="PATH", help="the target: a Hugging Face folder or a .gguf file")
    add("--kind", choices=("eagle3", "mtp"), required=True, help="eagle3, or mtp: one module, used for every draft")
    add("--data", type=Path, required=True, metavar="PATH", help="a .txt or .jsonl file, or a folder that save_hidden_states wrote")
    add("--out", type=Path, required=True, metavar="FOLDER", help="where the head goes; what is needed to resume goes to FOLDER/training")
    add("--draft-vocab", type=int, metavar="N", help="tokens that the head may propose, by frequency (default: 8192, or all)")
    add("--intermediate-size", type=int, metavar="N", help="width of the head's perceptron (default: the target's)")
    add("--steps", type=int, default=600, metavar="N", help="batches to learn from (default: %(default)s)")
    add("--batch-tokens", type=int, default=2048, metavar="N", help="tokens of a batch, in whole texts (default: %(default)s)")
    add("--max-length", type=int, default=512, metavar="N", help="tokens used of a text, or of a prompt to answer (default: %(default)s)")
    add("--lr", type=float, default=1e-3, metavar="X", help="greatest learning rate (default: %(default)s)")
    add("--ttt-steps", type=int, default=4, metavar="N", help="drafts in a row that it is trained for, 1 to 8 (default: %(default)s)")
    add("--answers", type=int, default=0, metavar="N", help="let the target answer the texts first, in at most N tokens")
    add("--temperature", type=float, default=0.7, metavar="X", help="of these answers (default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cpu or cuda (default: %(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the products while training (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the first weights, the order and the split (default: %(default)s)")
    add("--eval-share", type=float, default=0.05, metavar="X", help="share of the texts that is held out (default: %(default)s)")
    add("--report-texts", type=int, default=16, metavar="N", help="texts that the final report decodes (default: %(default)s)")
    add("--report-tokens", type=int, default=64, metavar="N", help="tokens of each (default: %(default)s)")
    add("--save-every", type=int, default=50, metavar="N", help="steps between two checkpoints (default: %(default)s)")
    add("--resume", action="store_true", help="go on with what --out holds")
    add("--quiet", action="store_true", help="no progress bars")
    return parser.parse_args(arguments)


def check(options: argparse.Namespace) -> None:
    """ValueError names the flag, before anything is read or made."""
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
    for flag, most_real in (("lr", 1.0), ("eval-share", 0.9)):
        real = getattr(options, flag.replace("-", "_"))
        if not 0 < real <= most_real:
            raise ValueError(f"--{flag}: got {real}, expected more than 0, at most {most_real:g}")
    if not 0 <= options.temperature <= 10:
        raise ValueError(f"--temperature: got {options.temperature}, expected a number from 0 to 10")
    if not options.data.exists():
        raise ValueError(f"--data: {options.data} is not there")
    work = options.out / "training"
    if options.resume and not work.is_dir():
        raise ValueError(f"--resume: {options.out} holds no training")
    if not options.resume and options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise ValueError(f"--out: {options.out} is not an empty folder; want a new one, or --resume")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        check(options)
        from tools.train.command import run  # torch takes seconds, which a wrong flag should not

        return run(options)
    except ValueError as error:
        print(f"train_head: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train_head: interrupted; --resume goes on from here", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
