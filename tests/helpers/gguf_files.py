"""GGUF files, written by the `gguf` package."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from tests.helpers.made_tokenizers import byte_level, sentence_pieces

Quantise = Kind | Callable[[str], Kind]  # of all matrices, or by name
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
FAMILY_NAMES = {  # in addition, by architecture
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp", "self_attn.sinks": "attn_sinks"},
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def stored_name(name: str, kind: str) -> str:
    stem, end = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{end}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{(NAMES | FAMILY_NAMES.get(kind, {}))[part]}.{end}"


def side_by_side(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """The halves of each head interleaved row by row, the layout of Llama models in GGUF."""
    size = len(weight) // heads
    order = [head * size + half * (size // 2) + index for head in range(heads) for index in range(size // 2) for half in (0, 1)]
    return weight[order]


def scale_bytes(kind: Kind) -> slice:
    """The bytes of a block that hold its scales as float16."""
    if kind in (Kind.Q2_K, Kind.Q3_K, Kind.Q6_K):
        return slice(-4 if kind is Kind.Q2_K else -2, None)
    return slice(2) if kind in (Kind.Q4_0, Kind.Q5_0, Kind.Q8_0) or kind.name.startswith("IQ") else slice(4)


def random_blocks(values: npt.NDArray[np.float32], quantise: Kind) -> npt.NDArray[np.uint8]:
    """Blocks with every number and small scales, where the package cannot quantise."""
    draw, (size, block_bytes) = np.random.default_rng(values.size), gguf.GGML_QUANT_SIZES[quantise]
    blocks = draw.integers(256, size=(values.size // size, block_bytes), dtype=np.uint8)
    scales = blocks[:, scale_bytes(quantise)]
    scales[:] = draw.uniform(1e-5, 1e-4, size=(len(blocks), scales.shape[1] // 2)).astype(np.float16).view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def write_gguf(
    path: Path,
    kind: str,
    add_tokens: Callable[[gguf.GGUFWriter], None],
    model: Any = None,
    quantise: Quantise | None = None,
    tensors_per_file: int = 0,
) -> Path:
    """model: of transformers; without it the file has a tokenizer only. tensors_per_file: 0 for one file."""
    writer = gguf.GGUFWriter(path, kind, split_max_tensors=tensors_per_file)
    add_tokens(writer)
    if model is not None:
        _add_model(writer, kind, model, quantise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_model(writer: gguf.GGUFWriter, kind: str, model: Any, quantise: Quantise | None) -> None:
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "num_local_experts"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if kind == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_positions(writer, kind, config)
    for name, tensor in _parts(model.state_dict(), kind):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        values = side_by_side(values, heads) if heads and kind == "llama" else values
        if quantise is not None and values.ndim >= 2 and "mlp.gate." not in name and "router" not in name and "bias" not in name:
            chosen = quantise if isinstance(quantise, Kind) else quantise(name)
            cannot = chosen.name.endswith("_K") or chosen.name.startswith("IQ")
            blocks = (random_blocks if cannot else gguf.quants.quantize)(values, chosen)
            writer.add_tensor(stored_name(name, kind), blocks, raw_dtype=chosen)
        else:
            writer.add_tensor(stored_name(name, kind), np.ascontiguousarray(values))


def _add_positions(writer: gguf.GGUFWriter, kind: str, config: Any) -> None:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if kind == "phi3":
        _add_phi(writer, config, head_size)
    else:
        writer.add_key_length(head_size)
    if kind in ("gemma3", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window)
        if (base := config.rope_parameters.get("sliding_attention", {}).get("rope_theta", 10_000.0)) != 10_000.0:
            writer.add_float32(f"{kind}.rope.freq_base_swa", base)  # absent from most files of Gemma 3
        if rope["rope_type"] != "default":
            writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
            writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_phi(writer: gguf.GGUFWriter, config: Any, head_size: int) -> None:
    rope, original = config.rope_parameters, config.original_max_position_embeddings
    writer.add_rope_dimension_count(int(head_size * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_sliding_window(config.sliding_window or 0)
    if rope["rope_type"] == "longrope":
        longer = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(longer) / math.log(original)))
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))


def _parts(tensors: dict[str, Tensor], kind: str) -> Iterator[tuple[str, Tensor]]:
    """Gate and up of experts as two tensors, as in a file; transformers has one, in which those of GPT-OSS alternate."""
    for name, tensor in tensors.items():
        stem, _, bias = name.partition("_proj_")
        if kind == "gpt-oss" and ".experts." in name:
            rows = tensor if bias else tensor.mT
            end = ".bias" if bias else ".weight"
            stem = stem.removesuffix("_proj")
            halves = (
                {stem: rows}
                if stem.endswith("down")
                else {stem.replace("gate_up", part): rows[:, at::2] for at, part in enumerate(("gate", "up"))}
            )
            yield from ((f"{part}_proj{end}", half) for part, half in halves.items())
        elif name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True):
                yield name.replace("gate_up_proj", f"{part}.weight"), half
        elif kind == "gemma3" and name.endswith("norm.weight"):
            yield name, tensor + 1
        else:
            yield name + ".weight" * name.endswith(("experts.down_proj", ".sinks")), tensor


def add_byte_level(writer: gguf.GGUFWriter, pre: str = "gpt-2") -> None:
    """The tokenizer of `made_tokenizers`."""
    content = json.loads(byte_level().to_str())
    texts = {**content["model"]["vocab"], **{entry["content"]: entry["id"] for entry in content["added_tokens"]}}
    special = {entry["id"]: 3 if entry["special"] else 4 for entry in content["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(sorted(texts, key=texts.__getitem__))
    writer.add_token_types([special.get(index, 1) for index in range(len(texts))])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def add_pieces(writer: gguf.GGUFWriter) -> None:
    """The SentencePiece tokenizer of `made_tokenizers`."""
    pieces = sentence_pieces()
    ids = range(pieces.vocab_size())
    kinds = {6: pieces.is_byte, 3: pieces.is_control, 2: pieces.is_unknown, 4: lambda index: pieces.id_to_piece(index) == "<call>"}
    writer.add_tokenizer_model("llama")
    writer.add_token_list([pieces.id_to_piece(index) for index in ids])
    writer.add_token_scores([pieces.get_score(index) for index in ids])
    writer.add_token_types([next((kind for kind, is_kind in kinds.items() if is_kind(index)), 1) for index in ids])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
