"""Benchmark of the demonstration's model pair: interleaved variants on held-out prompts, and `transformers`; JSON and free text.

    python tools/bench_demo.py                   the table, one JSON document last; under 8 minutes on an idle machine
    python tools/bench_demo.py --prompts 1 --legal 100      and 500 answers validated against their schemas
    python tools/bench_demo.py --acceptance 20              instead: tokens per round by drafters, on five schemas that training never saw
    python tools/bench_demo.py --grammar-rounds 1000        instead: constrained over unconstrained rounds, which alternate
    python tools/bench_demo.py --hidden 200                 instead: the share of host grammar work that is hidden, for every drafter

Tokens per second count from a request's first token on, since prefill costs all variants the same. Greedy decoding.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

import jsonschema
import torch
from tqdm import tqdm

from stepgraph import Constraint, Engine, EngineConfig, FinishReason
from stepgraph.runtime.demo.pair import DRAFTS, head_path, target_path
from stepgraph.runtime.demo.variants import LOOK_UP, Case, Pair, Variant, open_pair, tokens_per_second, variants
from tools.bench import constrained_round, hidden_time
from tools.origin import origin
from tools.train.demo.collect import LONGEST_PROMPT, encode_prompts
from tools.train.demo.measure import VARIANTS, measure
from tools.train.demo.prompts import make_prompt
from tools.train.demo.schemas import MEASURED, SCHEMAS

FIRST_SEED = 1000  # above the seeds of the model card
TRAINING_PROMPTS = 400  # number of training prompts whose kinds are listed
TALK = "talk"
ROUND_DRAFTS = 3  # drafts of the rounds of --grammar-rounds
NEW_TOKENS = 160
BASELINE = "transformers + grammar"


def bench_variants(drafts: int) -> list[Variant]:
    """The demonstration's four variants, then fixed draft lengths: with all sources, and the head alone."""
    return [
        *variants(drafts),
        Variant(f"speculative + grammar, always {drafts}", drafts, True, {"look_up": LOOK_UP, "forced_drafts": True}),
        Variant("head alone, masked", drafts, True, {"forced_drafts": False}),
        Variant("head alone, not masked", drafts, True, {"forced_drafts": False, "draft_masks": False}),
    ]


def speed(times: list[tuple[int, float]]) -> dict[str, Any]:
    """The rate over all answers, and the quartiles. times: tokens and seconds of each answer."""
    rates = sorted(tokens / seconds for tokens, seconds in times if tokens)
    quartiles = [round(rates[len(rates) * part // 4], 1) for part in (1, 3)]
    return {"tokens_per_second": round(tokens_per_second(times), 1), "spread": quartiles}


def throughput(pair: Pair, drafts: int, prompts: int, repeats: int, threads: int, baseline: bool) -> dict[str, Any]:
    """Run every prompt with every variant in turn, `repeats` times."""
    encoded_prompts = list(
        encode_prompts(target_path(), (make_prompt(FIRST_SEED + seed, kind, held_out=True) for seed in range(prompts) for kind in MEASURED))
    )
    cases = [Case(variant, pair, LONGEST_PROMPT + NEW_TOKENS) for variant in bench_variants(drafts)]
    for case in cases:
        case.engine.capture()
    other = None
    if baseline:
        from tools.gpu.baselines.transformers_generate import Baseline

        other = Baseline(target_path(), torch.bfloat16)
        grammars = {kind: other.compile(json.dumps(SCHEMAS[kind])) for kind in MEASURED}
    times: list[tuple[int, float]] = []
    same = checked = 0
    for ids, each in tqdm(encoded_prompts * repeats, desc="throughput", unit="prompt", disable=not sys.stderr.isatty()):
        expected = Constraint.json_schema(each.schema) if each.schema else None
        texts = {case.variant.name: case.run(ids, expected, NEW_TOKENS).tokens for case in cases}
        checked += 1
        same += texts["plain + grammar"] == texts["speculative + grammar"]
        if other is not None:
            timed = other.generate(ids, NEW_TOKENS, grammars[each.kind])
            times.append((len(timed.tokens) - 1, timed.later_seconds))
    found = {case.variant.name: {**case.figures(), **speed(case.times)} for case in cases}
    free = free_text([case for case in cases if not case.variant.constrained], prompts, repeats)
    for case in cases:
        case.engine.close()
    if times:
        found[BASELINE] = speed(times)
    return {
        "prompts": len(encoded_prompts),
        "repeats": repeats,
        "threads": threads,
        "drafts": drafts,
        "same_texts": f"{same} of {checked}",
        "data": "prompts with names, places, things and topics that no training prompt has",
        "schemas": list(MEASURED),
        "schemas_of_training_prompts": sorted({make_prompt(seed).kind for seed in range(TRAINING_PROMPTS)} & set(MEASURED)),
        "variants": found,
        "free_text": free,
    }


def free_text(cases: list[Case], prompts: int, repeats: int) -> dict[str, Any]:
    """The variants without grammars on held-out questions."""
    questions = list(encode_prompts(target_path(), (make_prompt(FIRST_SEED + seed, TALK, held_out=True) for seed in range(prompts))))
    before = {case.variant.name: (len(case.times), case.engine.stats()) for case in cases}
    for ids, _ in tqdm(questions * repeats, desc="free text", unit="prompt", disable=not sys.stderr.isatty()):
        for case in cases:
            case.run(ids, None, NEW_TOKENS)
    found: dict[str, Any] = {}
    for case in cases:
        first, stats = before[case.variant.name]
        after = case.engine.stats()
        tokens_per_round = (after.tokens - stats.tokens) / (after.rounds - stats.rounds)
        found[case.variant.name] = {"tokens_per_round": round(tokens_per_round, 2), **speed(case.times[first:])}
    return found


def ratios(timed: Mapping[str, Any]) -> dict[str, float]:
    """The published targets of this pair."""
    found, free = timed["variants"], {name: row["tokens_per_second"] for name, row in timed["free_text"].items()}
    rate = {name: figures["tokens_per_second"] for name, figures in found.items()}
    length = {name: figures.get("tokens_per_round", 0.0) for name, figures in found.items()}
    result = {
        "speculative + grammar / plain + grammar (2.3)": rate["speculative + grammar"] / rate["plain + grammar"],
        "free text: speculative / plain (1.1)": free["speculative"] / free["plain"],
        "tokens of a round, masked / not masked drafts (1.1)": length["head alone, masked"] / length["head alone, not masked"],
    }
    if BASELINE in rate:
        result["plain + grammar / transformers + grammar (1.0)"] = rate["plain + grammar"] / rate[BASELINE]
        result["speculative + grammar / transformers + grammar (1.8)"] = rate["speculative + grammar"] / rate[BASELINE]
    return {name: round(value, 3) for name, value in result.items()}


def legality(pair: Pair, drafts: int, count: int) -> dict[str, Any]:
    """Answers to `count` held-out prompts of every schema, validated with jsonschema."""
    config = EngineConfig(
        max_rows=8,
        num_speculative_tokens=drafts,
        draft_length=drafts,
        max_length=LONGEST_PROMPT + NEW_TOKENS,
        greedy_only=True,
        look_up=LOOK_UP,
        forced_drafts=True,
    )
    found: dict[str, Any] = {}
    with Engine(pair.target, pair.draft, vocabulary=pair.vocabulary, config=config) as engine:
        engine.capture()
        bar = tqdm(total=count * len(MEASURED), desc="legality", unit="answer", disable=not sys.stderr.isatty())
        for kind in MEASURED:
            encoded_prompts = encode_prompts(target_path(), (make_prompt(FIRST_SEED + seed, kind, held_out=True) for seed in range(count)))
            constraint = Constraint.json_schema(SCHEMAS[kind])
            jobs = [engine.submit(ids, constraint=constraint, max_new_tokens=NEW_TOKENS) for ids, _ in encoded_prompts]
            for event in engine.stream():
                bar.update(event.finish_reason is not None)
            done = [job for job in jobs if job.finish_reason in (FinishReason.STOP, FinishReason.CONSTRAINT_COMPLETE)]
            stop = pair.vocabulary.stop_token_ids
            texts = [pair.vocabulary.decode([token for token in job.tokens if token not in stop]) for job in done]
            legal = sum(valid(text, SCHEMAS[kind]) for text in texts)
            tokens, rounds = sum(len(job.tokens) for job in jobs), sum(job.rounds for job in jobs)
            found[kind] = {
                "answers": len(jobs),
                "complete": len(done),
                "legal_of_complete": legal,
                "cut_short": sum(job.finish_reason is FinishReason.LENGTH for job in jobs),
                "tokens_per_round": round(tokens / rounds, 3),
            }
        bar.close()
    return found


def acceptance(count: int) -> dict[str, Any]:
    """Tokens per round with DRAFTS drafts in every round, and the goals. They are counts, independent of the speed of the machine."""
    measured = measure(target_path(), head_path(), count, sys.stderr.isatty(), MEASURED)
    rate = {name: measured[name]["json"]["tokens_per_round"] for name in VARIANTS}
    masked, unmasked, _, everything = rate.values()
    figures = {
        "head alone, tokens per round (2.0)": masked,
        "with forced drafts and look-up, tokens per round (3.0)": everything,
        "head alone, masked / not masked drafts (1.1)": round(masked / unmasked, 3),
    }
    return {**origin(), "acceptance": measured, "ratios": figures}


def acceptance_lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'tokens per round':<32}{''.join(f'{kind:>10}' for kind in (*MEASURED, 'mean'))}"
    for name in VARIANTS:
        rates = [found["acceptance"][name][kind]["tokens_per_round"] for kind in (*MEASURED, "json")]
        yield f"{name:<32}{''.join(f'{rate:>10.2f}' for rate in rates)}"
    for name, value in found["ratios"].items():
        yield f"{name:<58}{value:>8}"


def valid(text: bytes, schema: Mapping[str, Any]) -> bool:
    try:
        jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    timed = found["throughput"]
    yield f"{'':<26}{'tokens/s':>10}{'quartiles':>16}{'tokens/round':>14}{'fills':>8}{'replays':>9}{'syncs':>7}"
    for name, row in timed["variants"].items():
        low, high = row["spread"]
        counts = "".join(
            f"{row.get(key, ''):>{width}}"
            for key, width in (("tokens_per_round", 14), ("mask_fills", 8), ("replays", 9), ("host_syncs", 7))
        )
        yield f"{name:<26}{row['tokens_per_second']:>10}{f'{low} to {high}':>16}{counts}"
    for name, row in timed["free_text"].items():
        low, high = row["spread"]
        yield f"{'free text: ' + name:<26}{row['tokens_per_second']:>10}{f'{low} to {high}':>16}{row['tokens_per_round']:>14}"
    yield ""
    for name, value in found["ratios"].items():
        yield f"{name:<58}{value:>8}"
    if "legality" in found:
        yield ""
        for kind, row in found["legality"].items():
            counts = f"{row['complete']} complete, {row['legal_of_complete']} of them legal, {row['cut_short']} cut short"
            yield f"{kind:<10}{row['answers']:>5} answers, {counts}"


def report(drafts: int, prompts: int, repeats: int, legal: int, threads: int, baseline: bool = True) -> dict[str, Any]:
    torch.set_num_threads(threads)
    pair = open_pair(drafts, sys.stderr.isatty())
    found = origin()
    found["throughput"] = throughput(pair, drafts, prompts, repeats, threads, baseline)
    found["ratios"] = ratios(found["throughput"])
    if legal:
        found["legality"] = legality(pair, drafts, legal)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-k", "--drafts", type=int, default=DRAFTS, help="drafts per round (default: %(default)s)")
    add("--prompts", type=int, default=3, metavar="N", help="timed prompts of each of five schemas, and questions (default: %(default)s)")
    add("--repeats", type=int, default=2, metavar="N", help="repeats (default: %(default)s)")
    add("--legal", type=int, default=0, metavar="N", help="validated prompts of each schema, 0 for none (default: %(default)s)")
    add("--acceptance", type=int, default=0, metavar="N", help="only tokens per round, of N prompts of each schema (default: the table)")
    add("--grammar-rounds", type=int, default=0, metavar="N", help="only N turns of a constrained and a free round (default: the table)")
    add("--hidden", type=int, default=0, metavar="N", help="only the hidden share of host work, in N rounds (default: the table)")
    add("--threads", type=int, default=1, metavar="N", help="torch threads, for every variant (default: %(default)s)")
    add("--no-baseline", action="store_true", help="leave transformers out")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    chosen = {acceptance_lines: options.acceptance, constrained_round.lines: options.grammar_rounds, hidden_time.lines: options.hidden}
    show = next((each for each, number in chosen.items() if number), lines)
    try:
        if options.acceptance:
            found = acceptance(options.acceptance)
        elif options.grammar_rounds:
            pair = open_pair(ROUND_DRAFTS, sys.stderr.isatty())
            found = origin() | constrained_round.report(pair, ROUND_DRAFTS, options.grammar_rounds)
        elif options.hidden:
            found = origin() | hidden_time.report(open_pair(options.drafts, sys.stderr.isatty()), options.drafts, options.hidden)
        else:
            found = report(options.drafts, options.prompts, options.repeats, options.legal, options.threads, not options.no_baseline)
    except ValueError as error:
        print(f"bench_demo: {error}", file=sys.stderr)
        return 2
    print("\n".join(show(found)))
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
