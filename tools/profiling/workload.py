"""The built-in bench of nsys_profile.py: an engine with all rows busy with JSON requests for a number of rounds.

python tools/profiling/workload.py --rounds 45
python tools/profiling/workload.py --rounds 45 --model folder --draft ngram
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

import torch
from tqdm import tqdm

from stepgraph import Constraint, Engine, EngineConfig, Vocabulary
from stepgraph.runtime.config import LaneName
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget

MAX_NEW_TOKENS = 200
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=45, help="number of rounds (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=4, help="concurrent requests (default: %(default)s)")
    parser.add_argument("-k", "--drafts", type=int, default=4, help="drafts per round (default: %(default)s)")
    parser.add_argument(
        "--grammar-lane", choices=get_args(LaneName), default="auto", help="where the grammar is followed (default: %(default)s)"
    )
    parser.add_argument("--model", type=Path, help="a model folder or .gguf file (default: the toy pair)")
    parser.add_argument("--draft", default="ngram", help="draft of the model (default: %(default)s)")
    return parser.parse_args(arguments)


def make_engine(options: argparse.Namespace) -> Engine:
    """An engine on the GPU if available."""
    config = EngineConfig(
        max_rows=options.rows,
        num_speculative_tokens=options.drafts,
        draft_length=options.drafts,
        max_length=512,
        buckets=(options.rows,),
        greedy_only=True,
        grammar_lane=options.grammar_lane,
        compile_isolation="none",  # one small grammar: needs no worker process, which could disturb the measurement
    )
    if options.model:
        return Engine.from_pretrained(options.model, options.draft, config=config)
    vocabulary = Vocabulary.printable()
    target = ToyTarget(vocabulary.logits_width, seed=2, biases={vocabulary.stop_token_ids[0]: -4.0})
    draft = ToyDraft(target, 0.8) if options.drafts else None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Engine(target.to(device), draft.to(device) if draft else None, vocabulary=vocabulary, config=config)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    constraint, prompt = Constraint.json_schema(SCHEMA), 0
    with make_engine(options) as engine:
        engine.compile(constraint)  # otherwise the first rounds would run without grammars
        engine.capture(progress=sys.stderr.isatty())
        with tqdm(total=options.rounds, desc="rounds", unit="round", disable=not sys.stderr.isatty(), leave=False) as bar:
            while (done := engine.stats().rounds) < options.rounds:
                stats = engine.stats()
                for _ in range(options.rows - stats.running - stats.waiting):
                    prompt += 1
                    engine.submit([prompt % 90, 1, 2, 3], constraint=constraint, max_new_tokens=MAX_NEW_TOKENS)
                engine.step()
                bar.update(engine.stats().rounds - done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
