"""Gain of forced drafts: rounds per token with and without them, for drafters of low, medium and high accuracy.

The target is a toy model that prefers long tokens, as tokenizers do. Counts, not times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stepgraph import Constraint, Engine, EngineConfig, Vocabulary
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget

WORDS = (*"first _name last email _address street postal _code quantity unit _price currency".split(), '":', ' "', '",')
NEW_TOKENS = 64
AGREEMENTS = {"forced only": None, "agreement 0": 0.0, "agreement 0.3": 0.3, "agreement 0.8": 0.8}


def record(**properties: Mapping[str, Any]) -> Constraint:
    closed = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return Constraint.json_schema(closed)


SHORT, COUNT = {"type": "string", "maxLength": 12}, {"type": "integer", "minimum": 0, "maximum": 999}
CONSTRAINTS = {
    "person": record(first_name=SHORT, last_name=SHORT, email_address=SHORT),
    "order": record(quantity=COUNT, unit_price=COUNT, currency={"enum": ["EUR", "USD"]}),
    "place": record(street=SHORT, postal_code=COUNT),
    "free string": Constraint.regex('"[a-z ]{40}"'),
}


def decode(
    vocabulary: Vocabulary,
    agreement: float | None,
    forced: bool,
    drafts: int,
    constraints: Mapping[str, Constraint] = CONSTRAINTS,
    prompts: int = 4,
) -> dict[str, dict[str, float]]:
    stop = vocabulary.stop_token_ids[0]
    biases = {token_id: 4.0 * len(token) for token_id, token in enumerate(vocabulary.tokens) if len(token) > 1 and token_id != stop}
    target = ToyTarget(vocabulary.logits_width, seed=2, biases=biases)
    config = EngineConfig(
        max_rows=1,
        num_speculative_tokens=drafts,
        draft_length=drafts,
        max_length=128,
        greedy_only=True,
        eager=True,
        backend="tape",
        forced_drafts=forced,
        compile_isolation="none",
    )
    draft = "forced" if agreement is None else ToyDraft(target, agreement)
    found = {}
    with Engine(target, draft, vocabulary=vocabulary, config=config) as engine:
        engine.capture()
        for name, constraint in constraints.items():
            before = engine.stats()
            jobs = [engine.generate([prompt], constraint=constraint, max_new_tokens=NEW_TOKENS) for prompt in range(prompts)]
            after, tokens, rounds = engine.stats(), sum(len(job.tokens) for job in jobs), sum(job.rounds for job in jobs)
            found[name] = {
                "rounds_per_token": round(rounds / tokens, 3),
                "accepted_per_round": round((after.drafts.accepted - before.drafts.accepted) / rounds, 3),
                "forced_per_round": round((after.drafts.forced - before.drafts.forced) / rounds, 3),
                "accepted_forced_per_round": round((after.drafts.accepted_forced - before.drafts.accepted_forced) / rounds, 3),
                "looks_per_round": round((after.forced_looks - before.forced_looks) / rounds, 3),
                "fills_per_round": round((after.mask_fills - before.mask_fills) / rounds, 3),
            }
    return found


def report(drafts: int = 4) -> dict[str, Any]:
    vocabulary = Vocabulary.printable(word.encode() for word in WORDS)
    variants: dict[str, Any] = {}
    for name, agreement in AGREEMENTS.items():
        variants[name] = {"forced": decode(vocabulary, agreement, True, drafts)}
        if agreement is not None:
            variants[name]["not forced"] = decode(vocabulary, agreement, False, drafts)
    return {"models": "toy pair", "drafts": drafts, "drafters": variants}


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines of the printed report."""
    yield f"rounds per token, {found['drafts']} drafts; forced drafts off and on; forced and accepted forced drafts per round"
    for drafter, variants in found["drafters"].items():
        for name, figures in variants["forced"].items():
            off = variants["not forced"][name]["rounds_per_token"] if "not forced" in variants else ""
            counts = f"{figures['forced_per_round']:>8}{figures['accepted_forced_per_round']:>8}"
            yield f"  {drafter:<14}{name:<14}{off:>8}{figures['rounds_per_token']:>8}{counts}"
