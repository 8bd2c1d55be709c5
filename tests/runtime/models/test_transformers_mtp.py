"""MTP modules with experts and latent attention, against the MTP model of `transformers` without a cache."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from stepgraph import Engine
from stepgraph.runtime.cli import main
from stepgraph.runtime.models.files.draft import open_draft
from stepgraph.runtime.models.files.transformers_folder import NATIVE, TRANSFORMERS, Implementation, open_target, open_transformers
from stepgraph.runtime.models.mtp import Mtp, TransformersMtp
from tests.helpers.draft_engines import change_json
from tests.helpers.draft_oracles import CachedDraft
from tests.helpers.families import CONFIG, GRAMMAR, PROMPTS, random_model, save
from tests.runtime.models.test_transformers_families import BASE, FAMILIES

slow = pytest.mark.slow
CASES = tuple((family, implementation) for family in ("DeepseekV3", "Glm4Moe") for implementation in (NATIVE, TRANSFORMERS))
LAYERS, HIDDEN = BASE["num_hidden_layers"], BASE["hidden_size"]
DRAFTS = torch.tensor([[5, 9, 0, 59], [1, 1, 2, 30]])


def write(folder: Path, family: str, count: int, change: Callable[[dict[str, Tensor]], object] = lambda tensors: None) -> Path:
    """A folder with `count` modules, stored as layers after the model's last one, as in public checkpoints."""
    fields = {**BASE, **FAMILIES[family], "num_hidden_layers": LAYERS + count, "num_nextn_predict_layers": count}
    save(random_model(family, fields, seed=count), folder)
    tensors, made = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(count)
    for layer in range(LAYERS, LAYERS + count):
        own = {f"{name}.weight": 1 + 0.3 * torch.randn(HIDDEN, generator=made) for name in ("enorm", "hnorm", "shared_head.norm")}
        own["eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=made) * (2 * HIDDEN) ** -0.5
        own["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        own["shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in own.items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_json(folder / "config.json", num_hidden_layers=LAYERS)
    return folder


def reference(folder: Path, model: Any, features: Tensor, history: list[int], drafts: list[int]) -> list[Tensor]:
    """Logits at every position of the history, then after each of `drafts`; like `draft_oracles.mtp_logits`."""
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS + index}\." for index in range(8)]
    modules: Any = MtpModel.from_pretrained(model)
    count = len(modules.layers)

    def run(index: int, states: Tensor, ids: list[int]) -> Tensor:
        places = torch.arange(len(ids))[None]
        found: Tensor = modules.forward_layer(index, states[None], places, None, input_ids=torch.tensor([ids]))
        return found[0]

    found, states, ids = [], features, [*history[1:], *drafts]
    for step in range(len(drafts) + 1):
        if count == 1:
            after = run(0, states, ids[: len(states)])
            states = torch.cat([states, after[-1:]])
        else:
            states = after = run(step, states, ids[step : step + len(states)])
        found.append(after @ model.lm_head.weight.T)
    return [found[0], *(each[-1] for each in found[1:])]


@functools.cache
def text() -> Tensor:
    return torch.randint(3, BASE["vocab_size"], (2, 21), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("family", "implementation"), CASES)
def test_logits_equal_transformers_at_every_step(family: str, implementation: Implementation, count: int, tmp_path: Path) -> None:
    folder, tokens = write(tmp_path / family, family, count), text()
    opened = open_target(folder, implementation=implementation)
    opened_draft = open_draft("mtp", opened)
    draft = opened_draft.load(opened.load("cpu"), "cpu")
    assert isinstance(draft, Mtp if implementation == NATIVE else TransformersMtp)
    hf_model = type(open_transformers(folder).meta_model).from_pretrained(folder)
    drafts = DRAFTS if count == 1 else DRAFTS[:, :1]
    with torch.no_grad():
        features = hf_model.model(tokens, use_cache=False).last_hidden_state[:, :-1]
        drafting = CachedDraft(draft, HIDDEN, k=drafts.shape[1] + 1)
        logits, last = drafting.read(tokens, features, 9)
        chain = drafting.draft(tokens.shape[1], drafts, last)
        for row in range(2):
            whole, *after = reference(folder, hf_model, features[row], tokens[row].tolist(), drafts[row].tolist())
            torch.testing.assert_close(logits[row, 1:], whole, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(torch.stack([each[row] for each in chain]), torch.stack(after), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("case", "count"), [(CASES[0], 2), (CASES[3], 2), *(pytest.param(each, 1, marks=slow) for each in CASES[1:3])])
def test_texts_equal_plain_decoding(case: tuple[str, Implementation], count: int, tmp_path: Path) -> None:
    """Also with the modules in a folder of their own. `auto` takes those of the target's folder."""
    family, implementation = case
    folder = write(tmp_path / family, family, count)
    tensors = load_file(folder / "model.safetensors")
    alone = save(random_model("Llama", BASE, 0), tmp_path / "alone")
    modules = {
        name: tensor for name, tensor in tensors.items() if name.startswith(tuple(f"model.layers.{LAYERS + i}." for i in range(count)))
    }
    save_file(modules, alone / "model.safetensors", metadata={"format": "pt"})
    texts = {}
    for draft in ("none", "auto", alone):
        with Engine.from_pretrained(folder, draft, config=replace(CONFIG, buckets=(3,)), implementation=implementation) as engine:
            engine.ensure_captured()
            assert ("draft: MTP" in " ".join(engine.notes)) == (draft != "none")
            jobs = [engine.submit(prompt, constraint=each, max_new_tokens=12) for each in (None, GRAMMAR) for prompt in PROMPTS]
            while engine.has_work:
                engine.step()
            texts[draft] = [job.tokens for job in jobs]
            assert not any(job.error for job in jobs) and (draft == "none" or any(job.num_accepted_drafts for job in jobs))
    assert texts["none"] == texts["auto"] == texts[alone]


@pytest.mark.parametrize("implementation", [NATIVE, TRANSFORMERS])
def test_inspect_checks_the_modules_of_a_model(implementation: Implementation, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = write(tmp_path / "whole", "Glm4Moe", 2), write(tmp_path / "damaged", "Glm4Moe", 1, removed("hnorm.weight"))
    for folder in folders:
        change_json(folder / "config.json", pretraining_tp=1 if implementation == NATIVE else 2)
    whole, damaged = ((main(["inspect", str(folder), "--json"]), json.loads(capsys.readouterr().out))[1] for folder in folders)
    assert whole["drafters"][0] == "mtp (MTP, up to 2 drafts; 0.5 MiB in float32)" and "mtp" not in whole["refused"]
    assert whole["runs"][0]["implementation"] == implementation and whole["family"] == "Glm4MoeForCausalLM"
    assert damaged["drafters"] == ["ngram", "forced"] and "model.layers.3.hnorm.weight is missing" in damaged["refused"]["mtp"]


def removed(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(f"model.layers.{LAYERS}.{name}")


def changed(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({f"model.layers.{LAYERS}.{name}": value})


def remove_modules(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(f"model.layers.{LAYERS}.")]:
        del tensors[name]


@pytest.mark.parametrize("implementation", [NATIVE, TRANSFORMERS])
def test_auto_is_look_up_for_a_count_without_modules(implementation: Implementation, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "Glm4Moe", 1, remove_modules)
    with Engine.from_pretrained(folder, config=CONFIG, implementation=implementation) as engine:
        assert "(auto: model has no MTP modules)" in " ".join(engine.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            removed("eh_proj.weight"),
            r"eh_proj.weight( is missing, expected .* \(64, 128\)|: got it in layers \[\], expected \[3\])",
        ),
        (
            removed("hnorm.weight"),
            r"model.layers.3.hnorm.weight is missing, expected .* shape \(64,\)",
        ),
        (
            changed("enorm.weight", torch.ones(63)),
            r"model.layers.3.enorm.weight: got shape \(63,\), expected \(64,\)",
        ),
        (changed("eh_proj.weight", torch.full((64, 128), torch.nan)), r"model.layers.3.eh_proj.weight holds NaN or infinity"),
        (removed("self_attn.kv_b_proj.weight"), r"model.layers.3.self_attn.kv_b_proj.weight is missing"),
        (removed("mlp.gate.weight"), r"model.layers.3.mlp.gate.weight is missing"),
        (changed("embed_tokens.weight", torch.ones(160, 64)), r"model.layers.3.embed_tokens.weight differs from the target's"),
        (changed("surplus.weight", torch.ones(2)), r"got 1 tensors that the config does not account for, such as model.layers.3.surplus"),
    ],
)
@pytest.mark.parametrize("implementation", [NATIVE, TRANSFORMERS])
def test_a_damaged_module_is_refused(
    change: Callable[[dict[str, Tensor]], object], message: str, implementation: Implementation, tmp_path: Path
) -> None:
    folder = write(tmp_path / "model", "DeepseekV3", 1, change)
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained(folder, "mtp", config=CONFIG, implementation=implementation)
