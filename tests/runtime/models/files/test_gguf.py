"""GGUF files, written here by the format's own package: the same model as the folder, quantised ones nearly so, broken ones refused."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.files.gguf_front import check_front
from tests.helpers.families import Cached, judge, refused_when_damaged

TOKENS = torch.arange(40)[None]
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
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
TEXTS = ["<s>", "<|im_start|>", "</s>", "<call>", *(f"t{place}" for place in range(4, 159)), "\u0120a"]


def stored_name(name: str) -> str:
    stem, end = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{end}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{end}"


def side_by_side(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """The two halves of each head interleaved, row by row, as the format wants it of Llamas."""
    size = len(weight) // heads
    order = [head * size + half * (size // 2) + place for head in range(heads) for place in range(size // 2) for half in (0, 1)]
    return weight[order]


def write(path: Path, family: str, kind: str, quantise: Kind | None = None) -> Path:
    model = judge(family)
    config = model.config
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if kind == "qwen3" else config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TEXTS)
    writer.add_token_types([3, 3, 3, 4, *[1] * (len(TEXTS) - 4)])
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        values = side_by_side(values, heads) if heads and kind == "llama" else values
        if quantise is not None and values.ndim == 2:
            writer.add_tensor(stored_name(name), gguf.quants.quantize(values, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(stored_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(path: Path) -> Tensor:
    return Cached(open_checkpoint(path, torch.float32).load("cpu")).run(TOKENS, 0, 40)[0]


def expected(family: str) -> Tensor:
    with torch.no_grad():
        return judge(family)(TOKENS).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("family", "kind"), [("llama-2", "llama"), ("mistral without a window", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
)
def test_a_file_is_the_model_it_was_written_from(tmp_path: Path, family: str, kind: str) -> None:
    found, answer = logits_of(write(tmp_path / "model.gguf", family, kind)), expected(family)
    assert float((found - answer).abs().max() / answer.abs().max()) < 1e-4


@pytest.mark.parametrize(("kind", "tolerance"), [(Kind.Q8_0, 0.05), (Kind.Q4_1, 0.5), (Kind.BF16, 0.05), (Kind.F16, 0.01)])
def test_a_quantised_file_is_nearly_that_model(tmp_path: Path, kind: Kind, tolerance: float) -> None:
    found, answer = logits_of(write(tmp_path / "model.gguf", "llama-2", "llama", kind)), expected("llama-2")
    assert 0 < float((found - answer).pow(2).mean() / answer.pow(2).mean()) < tolerance


def test_tokens_and_size_come_from_the_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "model.gguf", "smollm2", "llama"))
    vocabulary, config = checkpoint.vocabulary, checkpoint.config
    assert (config.tied, config.dtype, config.max_positions, config.vocab_size) == (True, torch.bfloat16, 512, 160)
    assert vocabulary.tokens[159] == b" a" and vocabulary.tokens[3] == b"<call>" and vocabulary.stop_token_ids == (2,)
    assert set(vocabulary.control_token_ids) == {0, 1}


def test_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", "llama-2", "llama")
    content = whole.read_bytes()
    broken = tmp_path / "broken.gguf"
    for share in (0.0, 0.0001, 0.01, 0.5, 0.99):
        broken.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(ValueError, match=r"broken.gguf: no whole GGUF file"):
            open_checkpoint(broken)
    broken.write_bytes(content.replace(b"llama.block_count", b"llama.block_cxunt"))
    with pytest.raises(ValueError, match="num_hidden_layers: got None"):
        open_checkpoint(broken)
    broken.write_bytes(content.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"))
    with pytest.raises(ValueError, match=r"got the tensor 'blk.1.attn_x.weight', for which there is no place"):
        open_checkpoint(broken)
    broken.write_bytes(content.replace(b"blk.1.attn_q.weight", b"blk.7.attn_q.weight"))
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn.q_proj.weight is missing"):
        open_checkpoint(broken)


FRONT = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a"  # one entry, whose value comes next


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (struct.pack("<IIQ", 9, 4, 1 << 60), "values of arrays, want at most"),
        (struct.pack("<IIQ", 9, 4, 1000), "it ends at byte 49, within what begins at 49"),
        (struct.pack("<IIQQ", 9, 8, 1000, 1) + b"b", "it ends at byte 58, within what begins at 58"),
        (struct.pack("<IIQI", 9, 9, 1, 9), "an array of kind 9"),
        (struct.pack("<IQ", 8, 1 << 63), "it ends at byte 45, within what begins at 45"),
        (struct.pack("<I", 77), "a value of kind 77"),
    ],
)
def test_lengths_are_held_against_the_file(tmp_path: Path, value: bytes, wanted: str) -> None:
    """Before the package reads on and on."""
    path = tmp_path / "model.gguf"
    path.write_bytes(FRONT + value)
    with pytest.raises(ValueError, match=f"model.gguf: no whole GGUF file: .*{wanted}"):
        open_checkpoint(path)


@pytest.mark.parametrize("order", gguf.GGUFEndian)
def test_the_front_of_a_whole_file_is_walked_to_its_end(tmp_path: Path, order: gguf.GGUFEndian) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", endianess=order)
    writer.add_token_list(["a", "b\u00e9"])
    writer.add_array("scores", [0.5, 1.5])
    writer.add_bool("flag", True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    check_front(tmp_path / "model.gguf")
    content = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[:-1])
    with pytest.raises(ValueError, match=f"it ends at byte {len(content) - 1}"):
        check_front(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    ("kind", "entry", "wanted"),
    [
        ("gemma", None, "general.architecture: got 'gemma', want one of llama, qwen2, qwen3"),
        ("llama", ("llama.rope.scaling.type", "yarn"), "llama.rope.scaling.type: got 'yarn', want none"),
    ],
)
def test_unsupported_fields_are_refused_by_name(tmp_path: Path, kind: str, entry: tuple[str, str] | None, wanted: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", kind)
    if entry:
        writer.add_string(*entry)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=wanted):
        open_checkpoint(tmp_path / "other.gguf")


def test_damaged_bytes_are_refused_or_harmless(tmp_path: Path) -> None:
    whole = write(tmp_path / "model.gguf", "llama-2", "llama").read_bytes()
    assert refused_when_damaged(tmp_path / "model.gguf", whole, 6000, tmp_path / "model.gguf") > 20
