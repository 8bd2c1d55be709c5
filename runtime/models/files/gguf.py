"""A GGUF file as a source of weights, a config and a token table. Quantised tensors are made whole when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepgraph.runtime.models.files.gguf_front import check_front
from stepgraph.runtime.models.files.weights import Stored

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
READABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
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
# What the gguf package's reader raises on a file that is cut off or lies about its sizes.
_BROKEN = (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError, OSError, MemoryError)


class GgufSource:
    """The tensors of one GGUF file under their Hugging Face names."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ModuleNotFoundError:
            raise ValueError(f"{path}: reading GGUF needs the gguf package: pip install 'stepgraph[gguf]'") from None
        try:
            check_front(path)
            reader = gguf.GGUFReader(path)
            self._fields = dict(reader.fields)
            self._tensors = {_rename(tensor.name, path): tensor for tensor in reader.tensors}
        except _BROKEN as error:
            raise ValueError(f"{path}: no whole GGUF file: {error}") from None
        self._path = path
        self.tensors = {
            name: Stored(tuple(int(size) for size in reversed(tensor.shape)), tensor.tensor_type.name, tensor.tensor_type.name in READABLE)
            for name, tensor in self._tensors.items()
        }
        self.config = self._read_config()

    def field(self, name: str) -> Any:
        """A metadata entry, or None."""
        found = self._fields.get(name)
        try:
            return None if found is None else found.contents()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self._path}: {name}: got bytes that are no UTF-8 ({error.reason}), want text") from None

    def read(self, name: str) -> Tensor:
        import gguf

        stored = self._tensors[name]
        values = gguf.quants.dequantize(stored.data, stored.tensor_type)
        tensor = torch.from_numpy(np.require(values, requirements=["C", "W"]))  # what is not quantised lies in the file itself
        turned = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if turned is not None and self.config["architectures"] == ["LlamaForCausalLM"]:
            # The format keeps the two numbers of a rotated pair side by side, the model half a head apart.
            heads = self.config[turned]
            tensor = tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        return tensor

    def _read_config(self) -> dict[str, Any]:
        """As a config.json would say it."""
        kind = self.field("general.architecture")
        if kind not in ARCHITECTURES:
            raise ValueError(f"{self._path}: general.architecture: got {kind!r:.100}, want one of {', '.join(ARCHITECTURES)}")
        scaled = self.field(f"{kind}.rope.scaling.type")
        if scaled not in (None, "none"):
            raise ValueError(f"{self._path}: {kind}.rope.scaling.type: got {scaled!r:.100}, want none")
        config = {ours: self.field(f"{kind}.{theirs}") for ours, theirs in _FIELDS.items()}
        embedding = self.tensors.get("model.embed_tokens.weight")
        return config | {
            "architectures": [ARCHITECTURES[kind]],
            "vocab_size": embedding.shape[0] if embedding else None,
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "dtype": "bfloat16",
        }


def _rename(name: str, path: Path) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _TOP:
        return f"{_TOP[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK:
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{parts[3]}"
    raise ValueError(f"{path}: got the tensor {name!r:.100}, for which there is no place in a model of the Llama family")
