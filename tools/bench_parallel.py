"""Cost of ranks: coordination of each step, messages of each round, and one model divided against the same model in one process.

    python tools/bench_parallel.py MODEL [MODEL ...] --ranks 2

Both engines of a model decode the same greedy requests in turn. Coordination is the work of rank 0 besides the step itself: publishing it,
noting results and comparing the notes; its processor time does not count waiting. Messages are the operations over ranks of a step, and
`sent_bytes` what a rank sends in them. For a draft model, `divided_over_whole` shows whether dividing it would pay: a replicated
draft costs every rank what the whole model costs one process. Processor times are of rank 0, without waiting. One JSON document last.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

import torch
from torch import Tensor

from stepgraph import Engine, EngineConfig
from stepgraph.graphs.layers import parallel
from stepgraph.runtime.parallel.ranks import Ranks
from tools.origin import origin

COORDINATION = ("publish", "note", "require_same_notes")
GOAL_MS = 0.2  # of coordination per step
ROWS, PROMPT = 4, 8


@dataclass
class Meter:
    """Costs of ranks in one process, per step."""

    wall: list[float] = field(default_factory=list)  # seconds of coordination
    processor: list[float] = field(default_factory=list)
    messages: int = 0
    sent: int = 0  # bytes

    def begin_step(self) -> None:
        self.wall.append(0.0)
        self.processor.append(0.0)


@contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """Measures coordination, and counts the operations over ranks, until the context ends."""
    coordination, gather = {name: getattr(Ranks, name) for name in COORDINATION}, parallel.gather

    def timed(name: str) -> Any:
        def run(ranks: Ranks, *arguments: Any) -> None:
            wall, processor = time.perf_counter(), time.thread_time()
            coordination[name](ranks, *arguments)
            meter.wall[-1] += time.perf_counter() - wall
            meter.processor[-1] += time.thread_time() - processor

        return run

    def counted(group: Any, values: Tensor, seconds: float) -> Tensor:
        meter.messages, meter.sent = meter.messages + 1, meter.sent + values.nbytes * (group.size() - 1)
        return gather(group, values, seconds)

    try:
        for name in COORDINATION:
            setattr(Ranks, name, timed(name))
        parallel.gather = counted
        yield
    finally:
        for name, method in coordination.items():
            setattr(Ranks, name, method)
        parallel.gather = gather


def decode(engine: Engine, tokens: int, meter: Meter) -> tuple[list[list[int]], dict[str, float], int]:
    """The tokens, the median times of a step that only decodes, and how many such steps there were. The meter counts these steps."""
    jobs = [engine.submit([3 + row + index for index in range(PROMPT)], max_new_tokens=tokens) for row in range(ROWS)]
    while not all(job.tokens for job in jobs):
        meter.begin_step()
        engine.step()
    for name, empty in vars(Meter()).items():
        setattr(meter, name, empty)
    wall, processor = list[float](), list[float]()
    while engine.has_work:
        meter.begin_step()
        start, used = time.perf_counter(), time.process_time()
        engine.step()
        wall.append(1e3 * (time.perf_counter() - start))
        processor.append(1e3 * (time.process_time() - used))
    return [job.tokens for job in jobs], {"wall_ms": statistics.median(wall), "processor_ms": statistics.median(processor)}, len(wall)


def measure(model: Path, ranks: int, tokens: int, turns: int) -> dict[str, Any]:
    config = EngineConfig(max_rows=ROWS, max_length=PROMPT + tokens + 1, num_speculative_tokens=0, draft_length=0, greedy_only=True)
    times: dict[str, list[dict[str, float]]] = {"whole": [], "divided": []}
    meter, opened = Meter(), functools.partial(Engine.from_pretrained, model, None, config=config, dtype=torch.float32)
    with opened() as whole, opened(tensor_parallel=ranks) as divided:
        for engine in (whole, divided):
            engine.capture()
        for _ in range(turns):
            expected, step_times, _ = decode(whole, tokens, Meter())
            times["whole"].append(step_times)
            with metered(meter):
                found, step_times, steps = decode(divided, tokens, meter)
            times["divided"].append(step_times)
    pairs = list(zip(times["whole"], times["divided"], strict=True))
    return {
        "model": model.name,
        "ranks": ranks,
        "steps": steps,
        "same_tokens": found == expected,
        "coordination_ms": {
            "processor_mean": 1e3 * statistics.mean(meter.processor),
            "wall_p50": 1e3 * statistics.median(meter.wall),
            "wall_p99": 1e3 * statistics.quantiles(meter.wall, n=100)[-1],
            "goal": GOAL_MS,
        },
        "messages_per_step": meter.messages / steps,
        "sent_bytes_per_step": meter.sent / steps,
        "step": {name: {unit: statistics.median(each[unit] for each in samples) for unit in samples[0]} for name, samples in times.items()},
        "divided_over_whole": {unit: statistics.median(b[unit] / a[unit] for a, b in pairs) for unit in pairs[0][0]},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = [measure(model, options.ranks, options.tokens, options.turns) for model in options.models]
    for each in found:
        cost, ratio, messages = each["coordination_ms"], each["divided_over_whole"], each["messages_per_step"]
        print(f"{each['model']}, {each['ranks']} ranks")
        print(f"  coordination of a step: {cost['processor_mean']:.3f} ms of processor time (goal {GOAL_MS}),", end=" ")
        print(f"wall p50 {cost['wall_p50']:.3f} ms, p99 {cost['wall_p99']:.3f} ms")
        print(f"  a step: {messages:.1f} messages, {each['sent_bytes_per_step']:.0f} bytes sent by each rank")
        print(f"  divided over whole: {ratio['processor_ms']:.2f} of the processor time, {ratio['wall_ms']:.2f} of the time")
    print(json.dumps({"origin": origin(), "models": found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
