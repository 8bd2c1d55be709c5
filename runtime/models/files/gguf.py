"""A GGUF file as a source of weights and of a config. The `gguf` package is used to dequantise only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stepgraph.graphs.layers.quantised import TILE, Grouped
from stepgraph.runtime.models.files.gguf_blocks import read_blocks
from stepgraph.runtime.models.files.weights import Stored
from stepgraph.runtime.models.llama_config import MIXTRAL, QWEN_EXPERTS
from stepgraph.sampling.grammar.tokenizers.gguf import read_gguf_header

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3moe": QWEN_EXPERTS}
_ROTATED_PAIRS = (ARCHITECTURES["llama"], MIXTRAL)  # a llama with experts is a Mixtral
SCALES = {  # the bytes of a block that hold its scales as float16
    "Q4_0": slice(2),
    "Q4_1": slice(4),
    "Q5_0": slice(2),
    "Q5_1": slice(4),
    "Q8_0": slice(2),
    "Q4_K": slice(4),
    "Q5_K": slice(4),
    "Q6_K": slice(-2, None),
}
READABLE = ("F32", "F16", "BF16", *SCALES)
_ROWS_AT_ONCE = 32  # the package takes 16 rows at a time, which is little work for a call
_VALUES_AT_ONCE = 2**18  # in float32, which fit in a cache
_GROUPED_AT_ONCE = 2**17  # of weights that stay quantised; torch starts threads for 2**15 words, which take longer than the work
_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")  # [experts, out, in]
_EACH_EXPERT = "<expert>"


class GgufSource:
    """The tensors of one GGUF file under their Hugging Face names.

    Attributes: config, as a config.json of the same model holds it; metadata; tensors; dtype. `read` dequantises to `dtype`.
    """

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        except ModuleNotFoundError:
            raise ValueError(f"{path}: reading GGUF needs the gguf package: pip install 'stepgraph[gguf]'") from None
        header = read_gguf_header(path)
        self._path, self.metadata, self.dtype = path, header.metadata, torch.float32
        self._data = np.asarray(np.memmap(path, mode="r"))  # operations on a memmap itself are slow
        self._kinds: dict[str, Any] = {}  # GGMLQuantizationType
        self._blocks: dict[str, npt.NDArray[np.uint8]] = {}  # [*shape[:-1], bytes per row]
        self._block_bytes: dict[str, int] = {}
        self.tensors: dict[str, Stored] = {}
        for stored_name, tensor in header.tensors.items():
            name = self._renamed(stored_name, len(tensor.shape))
            try:
                kind = GGMLQuantizationType(tensor.kind)
            except ValueError:
                raise ValueError(f"{path}: {stored_name}: got tensor type {tensor.kind}, which is unknown") from None
            values_per_block, block_bytes = GGML_QUANT_SIZES[kind]
            if not tensor.shape or tensor.shape[-1] % values_per_block:
                raise ValueError(
                    f"{path}: {stored_name}: got shape {tensor.shape}, expected rows of a multiple of {values_per_block} values"
                )
            rows = (*tensor.shape[:-1], tensor.shape[-1] // values_per_block * block_bytes)
            end = tensor.offset + math.prod(rows)
            if end > len(self._data):
                raise ValueError(f"{path}: not a complete GGUF file: {stored_name} ends at byte {end}, the file at {len(self._data)}")
            blocks = self._data[tensor.offset : end].reshape(rows)
            for index, part in enumerate(blocks) if _EACH_EXPERT in name else [(0, blocks)]:
                own = name.replace(_EACH_EXPERT, str(index))
                self._kinds[own], self._blocks[own], self._block_bytes[own] = kind, part, block_bytes
                shape = tensor.shape if part is blocks else tensor.shape[1:]
                self.tensors[own] = Stored(shape, kind.name, kind.name in READABLE)
        self.config = self._read_config(header.tensors)

    def read(self, name: str) -> Tensor:
        dtype, shape = self.dtype if self.tensors[name].kind in SCALES else torch.float32, self.tensors[name].shape
        return self._in_order(name, self._dequantised(name, dtype).view(shape))

    def _rows(self, name: str) -> npt.NDArray[np.uint8]:
        return self._blocks[name].reshape(-1, self._blocks[name].shape[-1])

    def _dequantised(self, name: str, dtype: torch.dtype) -> Tensor:
        """[rows, values of a row]"""
        import gguf

        stored = self._rows(name)
        values = torch.empty(len(stored), self.tensors[name].shape[-1], dtype=dtype)
        rows = max(_VALUES_AT_ONCE // values.shape[1] // _ROWS_AT_ONCE, 1) * _ROWS_AT_ONCE
        for first, part in enumerate(values.split(rows)):
            blocks = stored[first * rows :][: len(part)]
            joined = blocks.reshape(len(blocks) // math.gcd(len(blocks), _ROWS_AT_ONCE), -1)
            found = gguf.quants.dequantize(joined, self._kinds[name]).reshape(part.shape)
            part.copy_(torch.from_numpy(np.require(found, requirements=["C", "W"])))  # what the file maps cannot be written
        return values

    def read_scales(self, name: str) -> Tensor:
        """A quantised tensor is finite exactly if its scales are: the other numbers of a block are small integers."""
        scales = SCALES.get(self.tensors[name].kind)
        if scales is None:
            return self.read(name)
        blocks = self._blocks[name].reshape(-1, self._block_bytes[name])
        return torch.from_numpy(blocks[:, scales].copy().view(np.float16))

    def read_grouped(self, name: str) -> Iterator[Grouped]:
        kind, (count, inner) = self.tensors[name].kind, self.tensors[name].shape
        order = self._in_order(name, torch.arange(count)).numpy()
        for places in np.split(order, range(at_once := max(_GROUPED_AT_ONCE // inner // TILE, 1) * TILE, count, at_once)):
            yield read_blocks(kind, self._rows(name)[places])

    def _in_order(self, name: str, tensor: Tensor) -> Tensor:
        num_heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if num_heads is not None and self.config["architectures"][0] in _ROTATED_PAIRS:
            # GGUF stores the two numbers of a rotated pair next to each other; the model has them half a head apart.
            tensor = tensor.view(self.config[num_heads], -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        return tensor

    def _read_config(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        metadata = self.metadata
        kind = metadata.get("general.architecture")
        if kind not in ARCHITECTURES:
            raise ValueError(f"{self._path}: general.architecture: got {kind!r:.100}, expected one of {', '.join(ARCHITECTURES)}")
        scaling = metadata.get(f"{kind}.rope.scaling.type")
        if scaling not in (None, "none"):
            raise ValueError(f"{self._path}: {kind}.rope.scaling.type: got {scaling!r:.100}, expected none")
        embedding = tensors.get("token_embd.weight")
        fields = {ours: metadata.get(f"{kind}.{theirs}") for ours, theirs in _FIELDS.items()}
        return fields | {
            "architectures": [MIXTRAL if kind == "llama" and fields["num_local_experts"] else ARCHITECTURES[kind]],
            "vocab_size": embedding.shape[0] if embedding else None,
            "tie_word_embeddings": "output.weight" not in tensors,
            "norm_topk_prob": True,  # llama.cpp knows no other models of this architecture
            "dtype": "bfloat16",
        }

    def _renamed(self, stored: str, dimensions: int) -> str:
        """blk.3.attn_q.weight: model.layers.3.self_attn.q_proj.weight; with _EACH_EXPERT for a tensor of all experts."""
        parts, kind = stored.split("."), self.metadata.get("general.architecture")
        has_experts, mixtral = bool(self.metadata.get(f"{kind}.expert_count")), kind == "llama"
        mlp, *experts = ("block_sparse_moe", "w1", "w3", "w2") if mixtral else ("mlp", "gate_proj", "up_proj", "down_proj")
        block = _BLOCK | ({"ffn_gate_inp": f"{mlp}.gate"} if has_experts else {})
        if dimensions == 3:
            block = {name: f"{mlp}.experts.{_EACH_EXPERT}.{part}" for name, part in zip(_EXPERTS, experts, strict=True)}
        if len(parts) == 2 and parts[0] in _TOP:
            return f"{_TOP[parts[0]]}.{parts[1]}"
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in block:
            return f"model.layers.{parts[1]}.{block[parts[2]]}.{parts[3]}"
        raise ValueError(f"{self._path}: got the tensor {stored!r:.100}, which a model of the Llama family does not have")
