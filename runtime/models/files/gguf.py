"""A GGUF file as a source of weights and of a config. The `gguf` package is used to dequantise only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepgraph.graphs.layers.quantised import TILE, Grouped
from stepgraph.runtime.models.files.config_fields import GEMMA, GPT_OSS, LLAMA, MIXTRAL, PHI, QWEN_2, QWEN_3, QWEN_EXPERTS
from stepgraph.runtime.models.files.gguf_blocks import Bytes, read_blocks
from stepgraph.runtime.models.files.quantised_folder import ConfigFields
from stepgraph.runtime.models.files.weights import FLOATS, StoredTensor
from stepgraph.sampling.fields import is_int
from stepgraph.sampling.grammar.tokenizers.gguf import GgufHeader, GgufTensor, read_gguf_header

ARCHITECTURES = {"llama": LLAMA, "qwen2": QWEN_2, "qwen3": QWEN_3, "qwen3moe": QWEN_EXPERTS}
ARCHITECTURES |= {"gemma3": GEMMA, "phi3": PHI, "gpt-oss": GPT_OSS}
_ROTATED_PAIRS = (LLAMA, MIXTRAL)  # a llama with experts is a Mixtral
_ROWS_AT_ONCE = 32  # the package handles 16 rows per call, which is too little work
_VALUES_AT_ONCE = 2**18  # float32 values that fit in a cache
_GROUPED_AT_ONCE = 2**17  # for weights that stay quantised; from 2**15 words on, torch starts threads, which takes longer than the work
_CONFIG_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "final_logit_softcapping": "final_logit_softcapping",
}
_YARN_OPTIONS = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_log_multiplier": 0.0}
_WINDOW_PERIODS = {GEMMA: 6, GPT_OSS: 2}  # the last of so many layers has no window
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "rope_freqs": "rope_freqs"}
_TOP_NAMES |= {name: name for name in ("rope_factors_short", "rope_factors_long")}
_LAYER_NAMES = {
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
_FAMILY_NAMES = {
    GEMMA: {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    PHI: {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    GPT_OSS: {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
        **{f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")},
    },
}
_EXPERT_TENSORS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")  # [experts, out, in]
_EACH_EXPERT = "<expert>"


class GgufSource:
    """The tensors of one GGUF file under their Hugging Face names, and a `config` with the fields of a config.json of the same model.
    `read` dequantises to `dtype`."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        try:
            import gguf  # noqa: F401
        except ModuleNotFoundError:
            raise ValueError(f"{path}: reading GGUF needs the gguf package: pip install 'stepgraph[gguf]'") from None
        parts = _read_parts(path)
        self._path, self.metadata, self._dtype = path, parts[path].metadata, dtype
        kind = self.metadata.get("general.architecture")
        if not isinstance(kind, str) or kind not in ARCHITECTURES:
            raise ValueError(f"{path}: general.architecture: got {kind!r:.100}, expected one of {', '.join(ARCHITECTURES)}")
        self._kind, self._family = kind, ARCHITECTURES[kind]
        self._rows: dict[str, Bytes] = {}  # [rows, bytes per row]
        self._stored: dict[str, StoredTensor] = {}
        for part, header in parts.items():
            data = np.asarray(np.memmap(part, mode="r"))  # operations on a memmap itself are slow
            for name, tensor in header.tensors.items():
                self._add(part, data, name, tensor)
        self.tensors = dict(self._stored)
        self._parts: dict[str, list[str]] = {}  # of experts of GPT-OSS: the names of gate and up, or that of down
        if self._family == GPT_OSS:
            self._join_experts()
        self.rope_divisors = self._pop_numbers("rope_freqs")  # of Llama 3.1 and later
        self.config = self._read_config()

    def _pop_numbers(self, name: str) -> list[float]:
        """The numbers of a tensor that is no parameter, empty if there is none."""
        stored = self.tensors.get(f"{name}.weight")
        if stored and not stored.readable:
            raise ValueError(f"{self._path}: {name}.weight: got tensor type {stored.kind}, expected F32, F16 or BF16")
        numbers = self.read(f"{name}.weight").flatten().tolist() if stored else []
        self.tensors.pop(f"{name}.weight", None)
        return numbers

    def _add(self, path: Path, data: Bytes, stored_name: str, tensor: GgufTensor) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

        name = self._renamed(stored_name, len(tensor.shape))
        try:
            kind = GGMLQuantizationType(tensor.kind)
        except ValueError:
            raise ValueError(f"{path}: {stored_name}: got tensor type {tensor.kind}, which is unknown") from None
        values_per_block, block_bytes = GGML_QUANT_SIZES[kind]
        if not tensor.shape or 0 in tensor.shape or tensor.shape[-1] % values_per_block:
            raise ValueError(f"{path}: {stored_name}: got shape {tensor.shape}, expected rows of a multiple of {values_per_block} values")
        rows = (*tensor.shape[:-1], tensor.shape[-1] // values_per_block * block_bytes)
        end = tensor.offset + math.prod(rows)
        if end > len(data):
            raise ValueError(f"{path}: not a complete GGUF file: {stored_name} ends at byte {end}, the file at {len(data)}")
        blocks = data[tensor.offset : end].reshape(rows)
        readable = kind.name in FLOATS or hasattr(quants, kind.name)  # the package has a class for each type that it dequantises
        for index, part in enumerate(blocks) if _EACH_EXPERT in name else [(0, blocks)]:
            part_name = name.replace(_EACH_EXPERT, str(index))
            if part_name in self._stored:
                raise ValueError(f"{path}: got the tensor {stored_name!r} twice")
            self._rows[part_name] = part.reshape(-1, rows[-1])
            self._stored[part_name] = StoredTensor(tensor.shape if part is blocks else tensor.shape[1:], kind.name, readable)

    def _join_experts(self) -> None:
        """As in a folder: the outputs of gate and up alternate in one tensor, and those of weights are the last dimension."""
        for name in [name for name in self.tensors if ".experts." in name and ".up_proj." not in name]:
            parts = list(dict.fromkeys((name, name.replace("gate_proj", "up_proj"))))
            (shape, kind, _), *others = stored = [self._stored.get(part, StoredTensor((), "no tensor", False)) for part in parts]
            if len(shape) > 1 and all(other.shape == shape for other in others):
                joined = name.replace("gate_proj", "gate_up_proj").replace(".weight", "").replace(".bias", "_bias")
                turned = (shape[0], *shape[2:], shape[1] * len(parts))
                self.tensors[joined] = StoredTensor(turned, kind, all(part.readable for part in stored))
                self._parts[joined] = parts
                for part in parts:
                    del self.tensors[part]

    def read(self, name: str) -> Tensor:
        if name not in self._parts:
            return self._to_model_order(name, self._dequantise(name))
        joined = torch.stack([self._dequantise(part) for part in self._parts[name]], 2).flatten(1, 2)
        return joined.mT if joined.dim() == 3 else joined

    def _dequantise(self, name: str) -> Tensor:
        import gguf

        stored, (shape, kind, _) = self._rows[name], self._stored[name]
        values = torch.empty(len(stored), shape[-1], dtype=torch.float32 if kind in FLOATS else self._dtype)
        rows = max(_VALUES_AT_ONCE // values.shape[1] // _ROWS_AT_ONCE, 1) * _ROWS_AT_ONCE
        for first, part in enumerate(values.split(rows)):
            blocks = stored[first * rows :][: len(part)]
            joined = blocks.reshape(len(blocks) // math.gcd(len(blocks), _ROWS_AT_ONCE), -1)
            found = gguf.quants.dequantize(joined, gguf.GGMLQuantizationType[kind]).reshape(part.shape)
            part.copy_(torch.from_numpy(np.require(found, requirements=["C", "W"])))  # the mapped file is not writable
        return values.view(shape)

    def read_grouped(self, name: str) -> Iterator[Grouped]:
        kind, (count, inner) = self.tensors[name].kind, self.tensors[name].shape
        order = self._to_model_order(name, torch.arange(count)).numpy()
        for places in np.split(order, range(at_once := max(_GROUPED_AT_ONCE // inner // TILE, 1) * TILE, count, at_once)):
            yield read_blocks(kind, self._rows[name][places])

    def _to_model_order(self, name: str, tensor: Tensor) -> Tensor:
        num_heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if num_heads is not None and self.config["architectures"][0] in _ROTATED_PAIRS:
            # GGUF stores the two elements of a rotated pair next to each other; in the model they are half a head apart.
            heads = self.config[num_heads] or self.config["num_attention_heads"]
            tensor = tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        return tensor - 1 if self._family == GEMMA and name.endswith("norm.weight") else tensor  # the model adds 1 to weights of norms

    def _read_config(self) -> dict[str, Any]:
        metadata, kind, family = self.metadata, self._kind, self._family
        embedding = self.tensors.get("model.embed_tokens.weight")
        fields = {ours: metadata.get(f"{kind}.{theirs}") for ours, theirs in _CONFIG_KEYS.items()}
        hidden, heads, rotated = fields["hidden_size"], fields["num_attention_heads"], metadata.get(f"{kind}.rope.dimension_count")
        head_size = hidden // heads if is_int(hidden) and is_int(heads) and heads else None
        window = metadata.get(f"{kind}.attention.sliding_window") if family in (GEMMA, PHI, GPT_OSS) else None
        if family in _WINDOW_PERIODS:
            self._fields("attention").one_of("sliding_window_pattern", None, _WINDOW_PERIODS[family])
        if family == GEMMA:
            by_width = fields["num_hidden_layers"] == 62 or fields["head_dim"] is None  # Gemma 3 27B, as in llama.cpp
            fields["query_pre_attn_scalar"] = head_size if by_width else fields["head_dim"]
        return fields | {
            "architectures": [MIXTRAL if family == LLAMA and fields["num_local_experts"] else family],
            "rope_theta": metadata.get(f"{kind}.rope.freq_base", 10_000.0),  # of all architectures, as in llama.cpp
            "rope_local_base_freq": metadata.get(f"{kind}.rope.freq_base_swa", 10_000.0),
            "partial_rotary_factor": rotated / head_size if family == PHI and is_int(rotated) and head_size else None,
            "sliding_window": window or None,
            "sliding_window_pattern": _WINDOW_PERIODS[GEMMA] if window else 1,
            "vocab_size": embedding.shape[0] if embedding else None,
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "norm_topk_prob": True,  # llama.cpp supports no other models of this architecture
            "rope_scaling": self._read_scaling(),
            "original_max_position_embeddings": metadata.get(f"{kind}.rope.scaling.original_context_length"),
            "dtype": "bfloat16",
        }

    def _read_scaling(self) -> dict[str, Any]:
        short, long = (self._pop_numbers(f"rope_factors_{name}") for name in ("short", "long"))
        linear = {"type": "linear", "factor": self.metadata.get(f"{self._kind}.rope.scale_linear")}  # the defaults of llama.cpp
        scaling = self._fields("rope.scaling", linear)
        factors = bool(short or long)
        kind = scaling.one_of("type", "none", "linear", "longrope" if factors else "yarn")
        for name, default in (_YARN_OPTIONS | ({} if factors or kind == "yarn" else {"attn_factor": 1.0})).items():
            scaling.one_of(name, None, default)
        stated = scaling.config
        if factors:
            scaling.one_of("factor", None, 0.0, 1.0)
            return {"rope_type": "longrope", "short_factor": short, "attention_factor": stated.get("attn_factor", 1.0)}
        if kind == "none" or (kind == "linear" and stated["factor"] in (None, 0.0, 1.0)):
            return {"rope_type": "default"}
        # llama.cpp rounds the bounds of interpolated frequencies, also for GPT-OSS, whose config has them unrounded.
        return {**stated, "rope_type": kind, "factor": stated["factor"] or 1.0, "truncate": self._family != GPT_OSS}

    def _fields(self, section: str, defaults: Mapping[str, Any] | None = None) -> ConfigFields:
        """The metadata of the architecture in a section."""
        start = f"{self._kind}.{section}."
        stated = {key.removeprefix(start): value for key, value in self.metadata.items() if key.startswith(start)}
        return ConfigFields({**(defaults or {}), **stated}, f"{self._path}: {start[:-1]}")

    def _renamed(self, stored: str, dimensions: int) -> str:
        """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; with _EACH_EXPERT for a tensor of all experts."""
        parts, has_experts, mixtral = stored.split("."), bool(self.metadata.get(f"{self._kind}.expert_count")), self._family == LLAMA
        mlp, *experts = ("block_sparse_moe", "w1", "w3", "w2") if mixtral else ("mlp", "gate_proj", "up_proj", "down_proj")
        block = _LAYER_NAMES | ({"ffn_gate_inp": f"{mlp}.gate"} if has_experts else {})
        if dimensions == 3:
            block = {name: f"{mlp}.experts.{_EACH_EXPERT}.{part}" for name, part in zip(_EXPERT_TENSORS, experts, strict=True)}
        block |= _FAMILY_NAMES.get(self._family, {})
        if len(parts) == 2 and parts[0] in _TOP_NAMES:
            return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in block:
            return f"model.layers.{parts[1]}.{block[parts[2]]}.{parts[3]}".replace(".sinks.weight", ".sinks")
        raise ValueError(f"{self._path}: got the tensor {stored!r:.100}, which a model of the Llama family does not have")


def _read_parts(path: Path) -> dict[Path, GgufHeader]:
    """The headers of a file, and of those after it if the model is divided: NAME-00001-of-00003.gguf."""
    first = read_gguf_header(path)
    count = first.metadata.get("split.count", 0)
    if count in (0, 1):
        return {path: first}
    end = f"-of-{count:05d}.gguf" if is_int(count) else ""
    if first.metadata.get("split.no") != 0 or not path.name.endswith(f"-00001{end}"):
        raise ValueError(f"{path}: got part {first.metadata.get('split.no')!r:.20} of {count!r:.20}, expected the first, NAME-00001{end}")
    stem = path.name.removesuffix(f"00001{end}")
    others = (path.with_name(f"{stem}{number:05d}{end}") for number in range(2, count + 1))  # one at a time: the file states their number
    return {path: first} | {other: read_gguf_header(other) for other in others}
