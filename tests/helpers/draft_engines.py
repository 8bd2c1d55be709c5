"""Draft folders for the tiny models of tests/helpers/families.py, engines that load them, and their reference logits."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stepgraph import Engine, EngineConfig
from stepgraph.graphs import TapeBackend
from stepgraph.runtime.models.eagle3 import Eagle3
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.files.draft_layouts import mtp_slices
from stepgraph.runtime.models.files.loading import Loaded, load_models
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import Eagle3Config, LlamaConfig, RopeConfig
from stepgraph.runtime.models.mtp import Mtp
from tests.helpers.draft_oracles import eagle3_logits, mtp_logits
from tests.helpers.families import BASE, VOCABULARY, folder_of, hf_model, random_model, save_tokenizer
from tools.random_weights import randomised
from tools.train.saving import extract_tensors, save_eagle3, save_mtp

CONFIG = EngineConfig(
    max_rows=2,
    max_length=48,
    page_size=4,
    prefill_chunk=5,
    backend="tape",
    buckets=(2,),
    greedy_only=True,
    eager=True,
    rounds_in_flight=1,
    compile_isolation="none",
)
NUM_LETTERS = 106  # of the families' tokenizer, after four markers
OWN_IDS = [*range(NUM_LETTERS, NUM_LETTERS + 4), *range(NUM_LETTERS - 1, -1, -1)]  # ids in the smaller model, for each token of the target
D2T = torch.arange(2, 110, 2)  # every other token, including the stop token
EAGLE_LAYERS = (3, 0, 2)


@dataclass(frozen=True)
class DraftCase:
    """A draft and the family of its target."""

    name: str
    family: str
    max_drafts: int = 6  # drafts per round

    @functools.cached_property
    def folder(self) -> Path:
        """The folder of the draft."""
        return save_draft(self.name, open_checkpoint(folder_of(self.family)).load("cpu"), _temporary() / self.name)

    @functools.cached_property
    def target(self) -> Path:
        """The folder of the target. With "mtp" it includes the module and a second copy of shared tensors, as public checkpoints do."""
        folder = folder_of(self.family)
        if self.name != "mtp":
            return folder
        whole = Path(shutil.copytree(folder, _temporary() / "with mtp"))
        tensors, modules = load_file(whole / "model.safetensors"), load_file(self.folder / "model.safetensors")
        repeated = {"embed_tokens": tensors["model.embed_tokens.weight"], "shared_head.head": tensors["lm_head.weight"]}
        tensors |= modules | {f"model.layers.4.{name}.weight": tensor.clone() for name, tensor in repeated.items()}
        save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
        change_json(whole / "config.json", num_nextn_predict_layers=1)
        return whole

    @property
    def draft(self) -> str | Path:
        return "mtp" if self.name == "mtp" else self.folder

    @functools.cached_property
    def loaded(self) -> Loaded:
        return load_models(self.target, self.draft, replace(CONFIG, num_speculative_tokens=1, draft_length=1))

    def engine(self, k: int, **changes: Any) -> Engine:
        """An engine that records a graph at its first use and runs in the thread of the caller; all engines share the models."""
        target, draft, vocabulary, _ = self.loaded
        config = replace(CONFIG, **{"num_speculative_tokens": k, "draft_length": k} | changes)
        engine = Engine(target, draft, vocabulary=vocabulary, config=config, backend=TapeBackend())
        engine.ensure_captured()
        return engine

    def reference_logits(self, history: Sequence[int], drafts: Sequence[int]) -> list[Tensor]:
        """Reference logits over the target's tokens after a history, then after each of `drafts`, computed without a cache."""
        text = torch.tensor([history])
        with torch.no_grad():
            states = hf_model(self.family)(text[:, :-1], output_hidden_states=True).hidden_states
        tensors, fields = _read(self.folder)
        if self.name == "eagle3":
            features = torch.cat([states[layer][0] for layer in EAGLE_LAYERS], -1)
            whole, *chain = eagle3_logits(tensors, fields, features, history, drafts, tensors["embed_tokens.weight"])
            return [torch.full((VOCABULARY,), -torch.inf, dtype=torch.float64).index_copy(0, D2T, each) for each in (whole[-1], *chain)]
        if self.name == "model":
            with torch.no_grad():
                whole = small_draft_model()(torch.tensor([[OWN_IDS[token] for token in (*history, *drafts)]])).logits[0]
            return list(whole[len(history) - 1 :, OWN_IDS].double())
        layers = range(4, 4 + fields["num_nextn_predict_layers"])
        reference = hf_model(self.family)
        embedding, head = reference.get_input_embeddings().weight.detach(), reference.get_output_embeddings().weight.detach()
        whole, *chain = mtp_logits(tensors, fields, layers, states[-1][0], history, drafts, embedding, head)
        return [whole[-1], *chain]


def save_draft(name: str, target: Llama, folder: Path) -> Path:
    """A random draft of the kind `name` for a target."""
    if name == "eagle3":
        layer = LlamaConfig(VOCABULARY, 32, 40, 4, 2, 8, (None,), rope=RopeConfig(500.0), dtype=target.config.dtype)
        config = Eagle3Config(layer, EAGLE_LAYERS, target.config.hidden_size, len(D2T))
        return save_eagle3(folder, randomised(Eagle3(config, d2t=D2T), 3), own_embedding=True)
    if name == "model":
        return save_small_draft_model(folder)
    experts = target.config.experts and replace(target.config.experts, dense_layers=frozenset())
    layers = replace(target.config, windows=(target.config.windows[-1],) * (1 if name == "mtp" else 3), experts=experts)
    mtp = randomised(Mtp(layers, embedding=target.embedding, head=target.unembedding), 3)
    if experts is None or experts.routing is None:
        return save_mtp(folder, mtp, first=4)
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")  # the layers are the target's
    save_file(extract_tensors(mtp, mtp_slices(layers, 4)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@functools.cache
def _temporary() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="drafts-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text(encoding="utf-8"))


@functools.cache
def small_draft_model() -> Any:
    """A draft model of another family, with fewer layers and more tokens than the target."""
    return random_model("Qwen2", BASE | {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": VOCABULARY + 16}, seed=9)


def save_small_draft_model(folder: Path) -> Path:
    """Save the smaller model with the target's tokens in another order and some extra tokens."""
    small_draft_model().save_pretrained(folder)
    save_tokenizer(folder, VOCABULARY)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    letters = {letter: OWN_IDS[token] for letter, token in content["model"]["vocab"].items()}
    added = [entry | {"id": OWN_IDS[entry["id"]]} for entry in content["added_tokens"]]
    more = {"ab": NUM_LETTERS + 4, "!!": NUM_LETTERS + 5}
    change_json(path, model=content["model"] | {"vocab": letters | more}, added_tokens=added)
    change_json(folder / "config.json", eos_token_id=OWN_IDS[2])
    change_json(folder / "generation_config.json", eos_token_id=OWN_IDS[2])
    return folder


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


DRAFTERS = [
    DraftCase("eagle3", "smollm2"),
    DraftCase("mtp", "qwen3"),
    DraftCase("mtp, one per draft", "mistral", max_drafts=3),
    DraftCase("model", "llama-2"),
]
