"""Check of sampling with speculation and a grammar: frequencies of whole texts match the target's masked distribution."""

from __future__ import annotations

from collections import Counter

import torch

from stepgraph import Constraint, Engine, SamplingParams
from stepgraph.sampling.grammar import CompiledConstraint, MaskStatus
from tests.helpers.chi_square import chi_square_p
from tests.helpers.oracles import filtered, prefix_logits
from tools.gpu.checks.context import ORACLE_TARGET, STOP, VOCABULARY, Context, Figures, compiled

PROMPT = (40, 2, 17)
CHOICE = Constraint.choice(["yes", "no", "not at all", "nothing", "yeah"])
TEMPERATURE, OTHER_TEMPERATURE, TOP_P = 1.5, 0.7, 0.95
MIN_P_VALUE = 1e-6


def text_probabilities(grammar: CompiledConstraint, temperature: float) -> dict[tuple[int, ...], float]:
    """Every possible text with its probability in float64: the product of its masked token probabilities."""
    found: dict[tuple[int, ...], float] = {}
    masks = torch.zeros(1, grammar.vocabulary.mask_words, dtype=torch.int32)

    def walk(text: tuple[int, ...], share: float) -> None:
        matcher = grammar.matcher()
        assert all(matcher.accept_token(token) for token in text)
        status = matcher.fill_next_token_bitmask(masks, 0)
        if status != MaskStatus.OK:
            found[text] = share
            return
        bits = ((masks[0][:, None] >> torch.arange(32)) & 1).flatten()
        logits = prefix_logits(ORACLE_TARGET, [*PROMPT, *text])[: len(VOCABULARY.tokens)]
        legal = [logit if bits[token] else float("-inf") for token, logit in enumerate(logits)]
        for token, chance in enumerate(filtered(legal, temperature, 0, TOP_P, 0.0)):
            longer = (*text, token)
            if chance and token == STOP:
                found[longer] = share * chance
            elif chance:
                walk(longer, share * chance)

    walk((), 1.0)
    return found


def sampled_texts_follow_the_target(context: Context) -> Figures:
    """Hundreds of seeds, K = 3, masked drafts and not: chi-square test against float64; a control with another temperature must fail."""
    grammar = compiled(CHOICE)
    assert grammar is not None
    law, other = (text_probabilities(grammar, temperature) for temperature in (TEMPERATURE, OTHER_TEMPERATURE))
    texts, count = sorted(law), 300 if context.rehearsal else context.count(6000, 2000)
    found: Figures = {"texts": len(texts), "seeds": count}
    for draft_masks in (True,) if context.rehearsal else (True, False):
        with context.engine(3, draft_masks=draft_masks, agreement=0.5, rows=32, sampled=True) as engine:
            observed = _observed(engine, count)
            accepted = engine.stats().drafts.accepted
        strange = set(observed) - set(texts)
        assert not strange, f"texts with probability 0: {strange}"
        assert accepted > 0, "no draft was accepted"
        counts = torch.tensor([observed[text] for text in texts])
        fits, control = (
            chi_square_p(counts, torch.tensor([shares.get(text, 0.0) for text in texts], dtype=torch.float64)) for shares in (law, other)
        )
        assert fits > MIN_P_VALUE, f"draft_masks={draft_masks}: p = {fits:.1e}; {observed}"
        assert control < MIN_P_VALUE, f"the control with another temperature was not rejected: p = {control:.1e}"
        found[f"p, draft_masks={draft_masks}"] = fits
    return found


def _observed(engine: Engine, count: int) -> Counter[tuple[int, ...]]:
    engine.compile(CHOICE)
    jobs = []
    for seed in range(count):
        sampling = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, seed=seed if seed % 2 else -1 - seed)  # half: rejection
        jobs.append(engine.submit(PROMPT, constraint=CHOICE, sampling=sampling, max_new_tokens=20))
        if len(jobs) % engine.config.max_queued == 0:
            _finish(engine)
    _finish(engine)
    return Counter(tuple(job.tokens) for job in jobs)


def _finish(engine: Engine) -> None:
    for _ in engine.stream():
        pass
