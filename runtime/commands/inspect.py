"""`stepgraph inspect`: what a model needs and which settings it runs with, from headers only: no weights are read."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from stepgraph.graphs.layers.quantised import kind_name
from stepgraph.runtime.check_models import AUTO, DRAFTER_NAMES, FORCED, NGRAM
from stepgraph.runtime.commands import terminal
from stepgraph.runtime.demo.pair import DEMO, head_path, model_path
from stepgraph.runtime.models.files.checkpoint import DEQUANTISED, QUANTISED, Checkpoint
from stepgraph.runtime.models.files.draft import OWN_MTP, open_draft
from stepgraph.runtime.models.files.gguf import GgufSource
from stepgraph.runtime.models.files.loading import own_parameters
from stepgraph.runtime.models.files.transformers_folder import NATIVE, TRANSFORMERS, Target, open_target
from stepgraph.runtime.models.files.weights import FLOATS, read_json
from stepgraph.sampling.fields import clip_repr

DRAFT = "draft"  # the name of --draft among what is refused
LOAD_MODES = ((NATIVE, DEQUANTISED), (NATIVE, QUANTISED), (TRANSFORMERS, DEQUANTISED))


def run(options: argparse.Namespace) -> int:
    with terminal.waiting("reading headers ..."):
        draft = str(head_path()) if options.draft in (None, AUTO) and options.model == DEMO else options.draft
        document = _inspected(model_path(options.model), draft)
    terminal.print_document(document, options.json, _lines)
    return 0 if document["runs"] and DRAFT not in document["refused"] else terminal.FAILED


def _inspected(path: str | Path, draft: str | None) -> dict[str, Any]:
    draft = None if draft in DRAFTER_NAMES else draft
    for name, file in (("MODEL", path), *([("--draft", draft)] if draft not in (None, OWN_MTP) else [])):
        if not file or not Path(file).exists():  # an empty path would be the current folder
            expected = "a local folder with a config.json, or a .gguf file"
            raise ValueError(f"{name}: got {clip_repr(str(file))}, which does not exist, expected {expected}")
    opened: dict[tuple[str, str], Target] = {}
    refused: dict[str, str] = {}
    for implementation, weights in LOAD_MODES:
        native = opened.get((NATIVE, DEQUANTISED))
        stored = native.source.tensors.values() if isinstance(native, Checkpoint) else ()
        if weights == QUANTISED and all(tensor.kind in FLOATS for tensor in stored):
            continue
        try:
            opened[implementation, weights] = open_target(path, None, weights, implementation)
        except ValueError as error:
            refused[f"{implementation}, {weights}"] = str(error)
    if not opened:
        return {"model": str(path), "runs": [], "refused": refused}
    first = next(iter(opened.values()))
    runs = [
        {"implementation": implementation, "weights": weights, "bytes": dict(_bytes_by_kind(target.outline().parameters()))}
        for (implementation, weights), target in opened.items()
    ]
    drafters = [NGRAM, FORCED]
    for name in [OWN_MTP] * bool(first.mtp_modules) + ([] if draft is None else [draft]):
        try:
            found = open_draft(name, first)
            outline = first.outline(found.feature_layers)
            own = _format_sizes(_bytes_by_kind(own_parameters(found.outline(outline), outline)))
            drafters.insert(0, f"{name} ({found.kind}, up to {found.max_drafts} drafts; {own})")
        except ValueError as error:
            refused[DRAFT if name == draft else OWN_MTP] = str(error)
    config = first.config
    return {
        "model": str(path),
        "family": _family(Path(path), first),
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_positions": config.max_positions,
        "stored": dict(Counter(tensor.kind for tensor in first.source.tensors.values())) if isinstance(first, Checkpoint) else {},
        "runs": runs,
        "drafters": drafters,
        "not_read": _unread_generation_fields(Path(path)),
        "refused": refused,
    }


def _unread_generation_fields(folder: Path) -> list[str]:
    """Fields that `generate` of transformers follows. Of these only the stop tokens are read here."""
    path = folder / "generation_config.json"
    fields = read_json(path) if path.exists() else {}
    unused = ("eos_token_id", "bos_token_id", "pad_token_id", "transformers_version", "_from_model_config", "use_cache")
    return [name for name in fields if name not in unused and fields[name] is not None]


def _family(path: Path, target: Target) -> str:
    if isinstance(target, Checkpoint) and isinstance(target.source, GgufSource):
        return str(target.source.config["architectures"][0])
    return str(read_json(path / "config.json")["architectures"][0])


def _bytes_by_kind(parameters: Iterable[nn.Parameter]) -> Counter[str]:
    found: Counter[str] = Counter()
    for parameter in parameters:
        found[kind_name(parameter)] += parameter.nbytes
    return found


def _format_sizes(nbytes: Mapping[str, int]) -> str:
    return ", ".join(f"{count / 2**20:,.1f} MiB in {kind}" for kind, count in nbytes.items())


def _lines(document: dict[str, Any]) -> list[str]:
    lines = [document["model"]]
    if document["runs"]:
        lines.append(
            f"{document['family']}: {document['layers']} layers of {document['hidden_size']}, {document['vocab_size']} tokens, "
            f"{document['max_positions']} positions"
        )
    if stored := document.get("stored"):
        lines.append("stored: " + ", ".join(f"{count} tensors in {kind}" for kind, count in stored.items()))
    for way in document["runs"]:
        lines.append(f"runs: implementation={way['implementation']}, weights={way['weights']}: {_format_sizes(way['bytes'])}")
    if drafters := document.get("drafters"):
        lines.append("drafters: " + ", ".join(drafters) + "; an EAGLE-3 head or a smaller model that --draft names")
    if unread := document.get("not_read"):
        lines.append(f"not read: {', '.join(unread)} of generation_config.json")
    return lines + [f"refused: {name}: {reason}" for name, reason in document["refused"].items()]
