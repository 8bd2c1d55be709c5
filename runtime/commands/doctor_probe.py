"""The checks of `stepgraph doctor` that could crash, as a separate process. Prints one JSON line per probe, at once: name and answer.

An answer is a dict, or the reason why a part does not work (empty if it does).
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from typing import Any


def torch_build() -> dict[str, Any]:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    variable = os.environ.get("OMP_NUM_THREADS", "")
    return {"cuda": torch.version.cuda or "", "devices": names, "threads": torch.get_num_threads(), "omp_num_threads": variable}


def native_link() -> str:
    """Why grammars are not driven from C; empty if they are."""
    from stepgraph.sampling.grammar.link.native import load
    from stepgraph.sampling.native import Unavailable

    try:
        load()
    except Unavailable as error:
        return str(error)
    return ""


def native_library() -> str:
    """Why the C library cannot be used; empty if it can."""
    from stepgraph.sampling.native import why_not

    return why_not()


def triton_launch() -> str:
    """Why Triton programs cannot run on the first GPU; empty if they can, and without a GPU."""
    import torch

    from stepgraph.sampling.kernels.triton import why_no_triton

    return why_no_triton(torch.device("cuda:0")) if torch.cuda.is_available() else ""


def attention() -> dict[str, str]:
    """The kernels for a typical bfloat16 model, or why they do not fit. On a GPU flashinfer is not built, which takes minutes."""
    import torch

    from stepgraph.graphs.attention.choose import choose_attention, unfit
    from stepgraph.graphs.model import AttentionShape

    shapes = (AttentionShape(heads=32, kv_heads=8, size=128, dtype=torch.bfloat16),)
    if not torch.cuda.is_available():
        return {"auto": str(choose_attention(torch.device("cpu"), "auto", shapes, 16))}
    return {name: unfit(name, torch.device("cuda:0"), shapes) for name in ("triton", "flashinfer")}


def filters() -> dict[str, str]:
    """The kernels for top-k, top-p and min-p, or why they do not fit."""
    import importlib.util

    import torch

    from stepgraph.sampling.kernels.filter_choice import choose_filters, why_not

    if not torch.cuda.is_available():
        return {"auto": str(choose_filters("cpu"))}
    flashinfer = "" if importlib.util.find_spec("flashinfer") else "flashinfer is not installed"
    return {"triton": why_not("triton", torch.device("cuda:0")), "flashinfer": flashinfer}


def grammar_lane() -> dict[str, str]:
    """Where grammars with tables are followed, and why on the host."""
    import torch

    from stepgraph import EngineConfig, Vocabulary
    from stepgraph.runtime.device_grammars import why_no_device_grammars

    config, device = EngineConfig(), "cuda:0" if torch.cuda.is_available() else "cpu"
    reason = why_no_device_grammars(config, torch.device(device), Vocabulary.printable())
    return {"auto": f"host, {reason}" if reason else "device"}


def self_test() -> dict[str, str] | str:
    """Decode one text under a schema, in recorded rounds on the tape."""
    from stepgraph import Constraint, Engine, EngineConfig, Vocabulary
    from stepgraph.runtime.models.toy import ToyDraft, ToyTarget

    vocabulary = Vocabulary.printable()
    target = ToyTarget(vocabulary.logits_width)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    config = EngineConfig(max_rows=1, num_speculative_tokens=2, max_length=64, greedy_only=True, backend="tape")
    with Engine(target, ToyDraft(target, agreement=0.8), vocabulary=vocabulary, config=config) as engine:
        report = engine.capture()
        job = engine.generate([1, 2], constraint=Constraint.json_schema(schema), max_new_tokens=32)
        stats = engine.stats()
    text = vocabulary.decode(job.tokens).decode()
    legal = job.finish_reason == "constraint_complete" and isinstance(json.loads(text)["ok"], bool)
    passed = legal and stats.rounds == stats.replays > 0 and stats.host_syncs == 0
    result = f"{text} in {stats.rounds} rounds, each one replay of a graph, {len(report.keys)} graphs captured"
    return {"result": result} if passed else job.error or f"{text!r}, {job.finish_reason}"


PROBES: tuple[Callable[[], object], ...] = (
    torch_build,
    native_link,
    native_library,
    triton_launch,
    attention,
    filters,
    grammar_lane,
    self_test,
)


def main() -> None:
    warnings.simplefilter("ignore")  # the answers contain what the warnings report
    for probe in PROBES:
        try:
            answer = probe()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps([probe.__name__, answer]), flush=True)


if __name__ == "__main__":
    main()
