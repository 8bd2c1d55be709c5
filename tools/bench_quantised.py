"""The demonstration's file kept quantised, dequantised to bfloat16, and in llama.cpp: greedy JSON answers to held-out prompts.

    python tools/bench_quantised.py              the table, one JSON document last; with `llama-cpp-python` installed also llama.cpp

Every prompt runs with every variant in turn; its schema is compiled before. Tokens per second count from a request's first token on, by the
clock. With one thread they are also given by the processor time of the process, on which other programs have less influence, and ratios use
processor time. llama.cpp has the same file, prompts and schemas as its own grammars, which also allow white space. Its binding applies
a grammar to all tokens before it chooses one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

import torch
from torch import nn

from stepgraph import Constraint
from stepgraph.runtime.demo.pair import DRAFTS, target_path
from stepgraph.runtime.demo.variants import Case, open_pair, tokens_per_second, variants
from stepgraph.runtime.models.files.checkpoint import DEQUANTISED, QUANTISED, WeightsMode
from tools.bench_demo import FIRST_SEED, NEW_TOKENS
from tools.origin import origin
from tools.train.demo.collect import LONGEST_PROMPT, encode_prompts
from tools.train.demo.prompts import make_prompt
from tools.train.demo.schemas import MEASURED, SCHEMAS

PLAIN, SPECULATIVE = "plain + grammar", "speculative + grammar"
LLAMA_CPP, UNCONSTRAINED = "llama.cpp + grammar", "llama.cpp"
GOALS = {  # least ratio of the first rate to the second
    f"{QUANTISED} {PLAIN} / {DEQUANTISED} {PLAIN}": 1.6,
    f"{QUANTISED} {SPECULATIVE} / {DEQUANTISED} {SPECULATIVE}": 1.3,
    f"{QUANTISED} {PLAIN} / {LLAMA_CPP}": 1.0,
    f"{QUANTISED} {SPECULATIVE} / {LLAMA_CPP}": 2.5,
}


class Timed(NamedTuple):
    tokens: int  # after the first event
    seconds: float
    processor_seconds: float


Run = Callable[[Sequence[int], str], Timed]  # arguments: prompt ids, name of the schema


def stepgraph_runs(weights: WeightsMode, drafts: int, draft_length: int | str) -> tuple[dict[str, Run], int]:
    """The variants with grammars, by name, and the bytes of the target's weights."""
    pair = open_pair(drafts, sys.stderr.isatty(), weights)
    found: dict[str, Run] = {}
    for variant in variants(drafts, draft_length=draft_length):
        if variant.constrained:
            case = Case(variant, pair, LONGEST_PROMPT + NEW_TOKENS)
            case.engine.capture()

            def run(ids: Sequence[int], kind: str, case: Case = case) -> Timed:
                events: list[float] = []
                case.run(ids, Constraint.json_schema(SCHEMAS[kind]), NEW_TOKENS, lambda event: events.append(time.process_time()))
                return Timed(*case.times[-1], time.process_time() - events[0])

            found[f"{weights} {variant.name}"] = run
    assert isinstance(pair.target, nn.Module)
    return found, sum(parameter.nbytes for parameter in pair.target.parameters())


def llama_cpp(threads: int) -> dict[str, Run]:
    """llama.cpp with and without grammars; empty if it is not installed."""
    try:
        import llama_cpp
    except ImportError:
        return {}
    length = LONGEST_PROMPT + NEW_TOKENS
    model = llama_cpp.Llama(str(target_path()), n_ctx=length, n_threads=threads, n_threads_batch=threads, verbose=False)
    grammars = {kind: llama_cpp.LlamaGrammar.from_json_schema(json.dumps(SCHEMAS[kind]), verbose=False) for kind in MEASURED}

    def run(ids: Sequence[int], kind: str, constrained: bool = True) -> Timed:
        tokens = model.generate(list(ids), temp=0.0, repeat_penalty=1.0, grammar=grammars[kind] if constrained else None)
        next(tokens)
        start, processor, count = time.perf_counter(), time.process_time(), 0
        for token in itertools.islice(tokens, NEW_TOKENS - 1):
            if token == model.token_eos():
                break
            count += 1
        return Timed(count, time.perf_counter() - start, time.process_time() - processor)

    return {LLAMA_CPP: run, UNCONSTRAINED: lambda ids, kind: run(ids, kind, constrained=False)}


def report(drafts: int, draft_length: int | str, prompts: int, repeats: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    prompt_kinds = [
        (ids, each.kind)
        for ids, each in encode_prompts(
            target_path(), (make_prompt(FIRST_SEED + seed, kind, held_out=True) for seed in range(prompts) for kind in MEASURED)
        )
    ]
    runs: dict[str, Run] = {}
    nbytes: dict[str, int] = {}
    for weights in (QUANTISED, DEQUANTISED):
        weight_runs, nbytes[weights] = stepgraph_runs(weights, drafts, draft_length)
        runs |= weight_runs
    runs |= llama_cpp(threads)
    times: dict[str, list[Timed]] = {name: [] for name in runs}
    for ids, kind in prompt_kinds * repeats:
        for name, run in runs.items():
            times[name].append(run(ids, kind))
    return {
        **origin(),
        "llama_cpp_python": getattr(sys.modules.get("llama_cpp"), "__version__", None),
        "data": f"{target_path().name}, {len(prompt_kinds)} prompts with names, places, things and topics that no training prompt has",
        "schemas": list(MEASURED),
        "repeats": repeats,
        "threads": threads,
        "drafts": drafts,
        "draft_length": draft_length,
        "weight_bytes": nbytes,
        "variants": {name: figures(found, threads) for name, found in times.items()},
        "ratios": ratios(times, threads) | {"bytes, quantised / dequantised": [round(nbytes[QUANTISED] / nbytes[DEQUANTISED], 3), 0.45]},
    }


def rate(times: Sequence[Timed], clock: bool) -> float:
    return tokens_per_second((each.tokens, each.seconds if clock else each.processor_seconds) for each in times)


def figures(times: Sequence[Timed], threads: int) -> dict[str, Any]:
    quartiles = statistics.quantiles((rate([each], threads > 1) for each in times if each.tokens), n=4)[::2]
    return {
        "tokens": sum(each.tokens for each in times),
        "tokens_per_second": round(rate(times, True), 1),
        **({} if threads > 1 else {"tokens_per_processor_second": round(rate(times, False), 1)}),
        "quartiles": [round(each, 1) for each in quartiles],
    }


def ratios(times: Mapping[str, Sequence[Timed]], threads: int) -> dict[str, list[float]]:
    """Each ratio of GOALS, and its goal."""
    found = {}
    for name, goal in GOALS.items():
        first, _, second = name.partition(" / ")
        if {first, second} <= {*times}:
            found[name] = [round(rate(times[first], threads > 1) / rate(times[second], threads > 1), 3), goal]
    return found


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    for name, row in found["variants"].items():
        low, high = row["quartiles"]
        processor_rate = row.get("tokens_per_processor_second", "")
        yield f"{name:<36}{row['tokens_per_second']:>8} tokens/s{processor_rate:>8} by processor time, quartiles {low} to {high}"
    for name, (value, goal) in found["ratios"].items():
        yield f"{name:<72}{value:>8}  goal {goal}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-k", "--drafts", type=int, default=DRAFTS, help="drafts per round (default: %(default)s)")
    add("--fixed", action="store_true", help="always --drafts drafts, instead of a number chosen by cost")
    add("--prompts", type=int, default=2, metavar="N", help="prompts of each of five schemas (default: %(default)s)")
    add("--repeats", type=int, default=2, metavar="N", help="repeats (default: %(default)s)")
    add("--threads", type=int, default=1, metavar="N", help="threads of torch and llama.cpp (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        found = report(options.drafts, options.drafts if options.fixed else "auto", options.prompts, options.repeats, options.threads)
    except ValueError as error:
        print(f"bench_quantised: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(found)))
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
