"""The tensor names of EAGLE-3 heads and MTP modules in public files."""

from __future__ import annotations

import re
from collections.abc import Iterator

from stepgraph.runtime.models.eagle3 import Eagle3Config
from stepgraph.runtime.models.files.weights import ParameterSlice, Source, layer_slices
from stepgraph.runtime.models.llama_config import LlamaConfig

# Parts of tensor names that only unsupported layers have.
_UNSUPPORTED = {
    ".mlp.experts.": "a mixture of experts (MoE)",
    ".mlp.gate.": "a mixture of experts (MoE)",
    "_proj_with_mqa.": "latent attention (MLA)",
    ".self_attn.kv_b_proj.": "latent attention (MLA)",
    ".self_attn.q_b_proj.": "latent attention (MLA)",
}


def eagle3_name(name: str) -> str:
    """EAGLE's name of a stored tensor. speculators calls the layer `layers.0`; some heads prefix all names with `model`."""
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def eagle3_slices(config: Eagle3Config, own_embedding: bool, own_head: bool) -> Iterator[tuple[str, ParameterSlice]]:
    """All stored tensors of a head except d2t and t2d."""
    layer, hidden = config.layer, config.layer.hidden_size
    yield "fc.weight", ParameterSlice("fuse", 0, hidden)
    yield "midlayer.hidden_norm.weight", ParameterSlice("state_norm", 0, hidden)
    yield from layer_slices(layer, "midlayer", "layer")
    yield "norm.weight", ParameterSlice("norm", 0, hidden)
    if own_head:
        yield "lm_head.weight", ParameterSlice("head", 0, config.draft_vocab_size)
    if own_embedding:
        yield "embed_tokens.weight", ParameterSlice("embedding", 0, layer.vocab_size)


def mtp_slices(config: LlamaConfig, first: int) -> Iterator[tuple[str, ParameterSlice]]:
    """All stored tensors of the modules except those of the target. first: layer number of the first module in the file."""
    hidden = config.hidden_size
    for index in range(config.num_layers):
        stored, module = f"model.layers.{first + index}", f"depths.{index}"
        whole = {"enorm": "token_norm", "hnorm": "state_norm", "eh_proj": "join", "shared_head.norm": "norm"}
        for name, parameter in whole.items():
            yield f"{stored}.{name}.weight", ParameterSlice(f"{module}.{parameter}", 0, hidden)
        yield from layer_slices(config, stored, f"{module}.layer")


def mtp_layers(source: Source) -> list[int]:
    """Layer numbers of the MTP modules in a file."""
    matches = (re.fullmatch(r"model\.layers\.(\d{1,6})\.eh_proj\.weight", name) for name in source.tensors)
    layers = sorted(int(match[1]) for match in matches if match)
    if layers and layers != list(range(layers[0], layers[0] + len(layers))):
        raise ValueError(f"eh_proj.weight: got it in layers {layers}, expected consecutive layers")
    return layers


def check_dense_layers(source: Source) -> None:
    """Raises ValueError if a tensor name shows that an MTP module has a layer of another family than Llama."""
    for name in source.tensors:
        kind = next((kind for part, kind in _UNSUPPORTED.items() if part in name), None)
        if kind:
            raise ValueError(f"{name}: got an MTP module with {kind}, expected a dense layer of the Llama family")


def mtp_shared(config: LlamaConfig, first: int, tied: bool) -> dict[str, str]:
    """Copies of target tensors that a file may hold for each module: from the stored name to the target's name."""
    embedding = "model.embed_tokens.weight"
    copies = {"embed_tokens.weight": embedding, "shared_head.head.weight": embedding if tied else "lm_head.weight"}
    return {f"model.layers.{first + index}.{name}": original for index in range(config.num_layers) for name, original in copies.items()}
