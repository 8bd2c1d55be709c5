"""Write an EAGLE-3 head in 8 bits, as compressed-tensors `pack-quantized`: half the bytes of bfloat16, which the engine keeps in memory.

    python tools/quantise_head.py head head-8

Each 32 inner indices of a matrix share one scale in float16. Norms, token ids, an embedding and matrices whose rows are not whole groups
remain as they are.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, metavar="HEAD", help="folder of a head that is not quantised")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    options = parser.parse_args(arguments)
    from tools.train.quantised import quantise_head

    try:
        quantise_head(options.head, options.out)
    except ValueError as error:
        print(f"quantise_head: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {(options.out / 'model.safetensors').stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
