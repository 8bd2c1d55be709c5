"""Native families with every kind of weights, drafter and grammar: the table of docs/models.md, which a test compares with this one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepgraph import Engine
from stepgraph.runtime.models.files.checkpoint import WeightsMode, open_checkpoint
from stepgraph.runtime.models.files.config_fields import ARCHITECTURES
from tests.helpers.c_library import needs_c
from tests.helpers.draft_engines import save_draft
from tests.helpers.families import BASE, CONFIG, FAMILIES, GRAMMAR, PROMPTS, random_model, save
from tests.runtime.models.files.test_quantised_folder import write, write_mxfp4

STORED, DEQUANTISED, KEPT = "stored", "dequantised", "quantised"
ALL, ANY_LAYERS = ("n-gram", "model", "EAGLE-3", "MTP"), ("n-gram", "model", "EAGLE-3")
EVERY = (STORED, DEQUANTISED, KEPT)
COMBINATIONS = {  # by the names of families in tests/helpers/families.py; each with and without a grammar
    "llama-3.1": (EVERY, ALL),
    "mistral": (EVERY, ALL),
    "qwen2": (EVERY, ALL),
    "qwen3": (EVERY, ALL),
    "gemma-3": (EVERY, ANY_LAYERS),
    "phi-4-mini": (EVERY, ANY_LAYERS),
    "mixtral": (EVERY, ANY_LAYERS),
    "qwen3-moe": (EVERY, ANY_LAYERS),
    "gpt-oss": ((STORED, DEQUANTISED), ANY_LAYERS),
    "deepseek-v3": (EVERY, ALL),
    "glm-4.5": (EVERY, ALL),
}
QUICK = (("gemma-3", KEPT), ("gpt-oss", DEQUANTISED), ("phi-4-mini", KEPT), ("qwen3-moe", KEPT), ("deepseek-v3", KEPT))
CASES = [(family, weights) for family, (kinds, _) in COMBINATIONS.items() for weights in kinds]
SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128}
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "head_dim": 16}
SHORTER = {"short_factor": [1.0] * 12, "long_factor": [4.0] * 12}
ONE_SIZE = replace(CONFIG, buckets=(3,))


def target(family: str, weights: str, folder: Path) -> Path:
    kind, changes = FAMILIES[family]
    sizes: dict[str, Any] = SIZES | ({"moe_intermediate_size": 128} if "moe_intermediate_size" in changes else {})
    sizes |= LATENT if "kv_lora_rank" in changes else {}
    scaling = changes.get("rope_scaling", {})
    sizes |= {"rope_scaling": {**scaling, **SHORTER}} if "short_factor" in scaling else {}
    model = random_model(kind, {**BASE, **changes, **sizes}, seed=len(family))
    if weights == STORED:
        return save(model, folder)
    if family == "gpt-oss":
        write_mxfp4(folder, model)
    else:
        write(folder, "FP8 per tensor", model)
    return folder


def texts(folder: Path, draft: Any, weights: str) -> list[list[int]]:
    kept: WeightsMode = "quantised" if weights == KEPT else "dequantised"
    with Engine.from_pretrained(folder, draft, config=ONE_SIZE, weights=kept, implementation="native") as engine:
        jobs = [engine.submit(prompt, constraint=each, max_new_tokens=12) for each in (None, GRAMMAR) for prompt in PROMPTS]
        while engine.has_work:
            engine.step()
        assert not any(job.error for job in jobs)
        return [job.tokens for job in jobs]


@pytest.mark.parametrize(
    ("family", "weights"),
    [pytest.param(*case, marks=[needs_c] * (case[1] == KEPT) + [pytest.mark.soak] * (case not in QUICK)) for case in CASES],
)
def test_every_drafter_gives_the_texts_of_plain_decoding(family: str, weights: str, tmp_path: Path) -> None:
    folder = target(family, weights, tmp_path / "target")
    expected, model = texts(folder, "none", weights), open_checkpoint(folder).load("cpu")
    for name in COMBINATIONS[family][1]:
        draft = "ngram" if name == "n-gram" else save_draft(name.lower().replace("-", ""), model, tmp_path / name)
        assert texts(folder, draft, weights) == expected, name


@pytest.mark.parametrize("family", [family for family, (_, names) in COMBINATIONS.items() if "MTP" not in names])
def test_mtp_modules_are_refused_for_other_layers_than_a_llamas(family: str, tmp_path: Path) -> None:
    folder = target("llama-3.1", STORED, tmp_path / "llama")
    modules = save_draft("mtp", open_checkpoint(folder).load("cpu"), tmp_path / "mtp")
    with pytest.raises(ValueError, match=r"got MTP modules, expected another drafter: the target .* has other layers than a Llama"):
        texts(target(family, STORED, tmp_path / "target"), modules, STORED)


def test_the_documented_combinations_are_those_tested() -> None:
    page = (Path(__file__).parents[3] / "docs/models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+ForCausalLM)` \| ([\w, ]+) \| ([\w, -]+) \| yes \|$", page, re.MULTILINE)
    tested = [(f"{FAMILIES[family][0]}ForCausalLM", *map(", ".join, parts)) for family, parts in COMBINATIONS.items()]
    assert rows == tested and {name for name, *_ in rows} == set(ARCHITECTURES)
