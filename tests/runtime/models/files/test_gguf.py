"""GGUF files written by the `gguf` package: logits equal the folder's, quantised ones nearly; broken files are refused."""

from __future__ import annotations

import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from stepgraph import Engine, EngineConfig
from stepgraph.graphs.layers.quantised import unpack
from stepgraph.runtime.models.files.checkpoint import WeightsMode, open_checkpoint
from stepgraph.runtime.models.files.gguf_blocks import BLOCK_LAYOUTS, read_blocks
from stepgraph.sampling.grammar.tokenizers.gguf import read_gguf_header
from tests.helpers.c_library import needs_c
from tests.helpers.families import BASE, CachedModel, count_refused_damaged, hf_model, random_model
from tests.helpers.gguf_files import random_blocks, scale_bytes, write_gguf

TOKENS = torch.arange(40)[None]
BLOCK_SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
TEXTS = ["<s>", "<|im_start|>", "</s>", "<call>", *(f"t{index}" for index in range(4, 159)), "\u0120a"]


def write(
    path: Path,
    family: str,
    kind: str,
    quantise: Kind | Callable[[str], Kind] | None = None,
    model: Any = None,
    more: Any = None,
    tensors_per_file: int = 0,
    scaling: dict[str, Any] | None = None,
    entries: dict[str, Any] | None = None,
) -> Path:
    """more: further tensors, by name. scaling: fields of rope.scaling. entries: of the architecture."""

    def add_tokens(writer: gguf.GGUFWriter) -> None:
        stated = {f"rope.scaling.{name}": value for name, value in (scaling or {}).items()} | (entries or {})
        for name, value in stated.items():
            adders: dict[type, Callable[..., None]] = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
            adders[type(value)](f"{kind}.{name}", value)
        for name, tensor in (more or {}).items():
            writer.add_tensor(name, tensor)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(TEXTS)
        writer.add_token_types([3, 3, 3, 4, *[1] * (len(TEXTS) - 4)])
        writer.add_eos_token_id(2)

    return write_gguf(path, kind, add_tokens, model or hf_model(family), quantise, tensors_per_file)


def logits_of(path: Path) -> Tensor:
    return CachedModel(open_checkpoint(path, torch.float32).load("cpu")).run(TOKENS, 0, 40)[0]


def expected(family: str) -> Tensor:
    with torch.no_grad():
        return hf_model(family)(TOKENS).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama-2", "llama"), ("mistral without a window", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
def test_gguf_logits_equal_the_source_model(tmp_path: Path, family: str, kind: str) -> None:
    found, answer = logits_of(write(tmp_path / "model.gguf", family, kind)), expected(family)
    assert float((found - answer).abs().max() / answer.abs().max()) < 1e-4


def test_gguf_without_a_number_of_key_heads_has_one_per_query_head(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama-2", "llama")
    before = logits_of(path)
    path.write_bytes(path.read_bytes().replace(b"llama.attention.head_count_kv", b"llama.attention.head_cxunt_kv"))
    assert torch.equal(logits_of(path), before)


def test_gguf_with_scaled_frequencies_of_llama_3_equals_the_source_model(tmp_path: Path) -> None:
    """llama.cpp stores the divisors of the frequencies as a tensor."""
    model = hf_model("llama-3.1")
    base = model.config.rope_parameters["rope_theta"] ** -(torch.arange(0, 16, 2) / 16)
    divisors = (base / model.model.rotary_emb.inv_freq).numpy()
    found = logits_of(write(tmp_path / "model.gguf", "llama-3.1", "llama", more={"rope_freqs.weight": divisors}))
    assert divisors.max() > 4 and float((found - expected("llama-3.1")).abs().max() / expected("llama-3.1").abs().max()) < 1e-4
    integers = (divisors.astype(np.int32), "got tensor type I32, expected F32")
    for wrong, message in (integers, (divisors[:3], "expected 8 numbers above 0"), (-divisors, r"got \[-1.0.*expected 8 numbers above 0")):
        with pytest.raises(ValueError, match=f"rope_freqs.weight: .*{message}"):
            open_checkpoint(write(tmp_path / "model.gguf", "llama-3.1", "llama", more={"rope_freqs.weight": wrong}))
    for scaling in ({"factor": 2.0}, {"type": "yarn", "factor": 2.0, "original_context_length": 16}):
        path = write(tmp_path / "model.gguf", "llama-3.1", "llama", more={"rope_freqs.weight": divisors}, scaling=scaling)
        with pytest.raises(ValueError, match=r"rope_freqs.weight: .* expected 8 numbers above 0, and no other scaling"):
            open_checkpoint(path)


@pytest.mark.parametrize(
    ("scaling", "stated"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "none", "factor": 4.0}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 0.0}, {"rope_type": "default"}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 16, "yarn_beta_fast": 32.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 16, "attn_factor": 0.5},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 0.5 * (0.1 * math.log(4) + 1)},
        ),
    ],
)
def test_gguf_with_scaled_positions_equals_the_source_model(tmp_path: Path, scaling: dict[str, Any], stated: dict[str, Any]) -> None:
    model = random_model("Qwen3", BASE | {"head_dim": 32, "rope_scaling": stated}, seed=1)
    with torch.no_grad():
        answer = model(TOKENS).logits
    found = logits_of(write(tmp_path / "model.gguf", "", "qwen3", None, model, scaling=scaling))
    assert float((found - answer).abs().max() / answer.abs().max()) < 1e-4


@pytest.mark.parametrize(("kind", "tolerance"), [(Kind.Q8_0, 0.05), (Kind.Q4_1, 0.5), (Kind.BF16, 0.05), (Kind.F16, 0.01)])
def test_quantised_gguf_logits_are_close_to_the_source_model(tmp_path: Path, kind: Kind, tolerance: float) -> None:
    found, answer = logits_of(write(tmp_path / "model.gguf", "llama-2", "llama", kind)), expected("llama-2")
    assert 0 < float((found - answer).pow(2).mean() / answer.pow(2).mean()) < tolerance


def test_a_load_dequantises_each_tensor_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantising takes most of the time of a load."""
    path, kinds, dequantise = write(tmp_path / "model.gguf", "llama-2", "llama", Kind.Q4_1), list[Kind](), gguf.quants.dequantize

    def counted(blocks: npt.NDArray[np.uint8], kind: Kind) -> npt.NDArray[np.float32]:
        kinds.append(kind)
        return dequantise(blocks, kind)

    monkeypatch.setattr(gguf.quants, "dequantize", counted)
    Engine.from_pretrained(path, config=EngineConfig(max_rows=1, num_speculative_tokens=0, max_length=32)).close()
    stored = [tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors]
    assert kinds.count(Kind.Q4_1) == stored.count(Kind.Q4_1) > 10


@pytest.mark.parametrize("kind", BLOCK_LAYOUTS)
def test_integers_and_scales_of_blocks_give_the_values_of_the_reference(kind: str) -> None:
    """Blocks of random bytes hold every integer of their type."""
    rows = random_blocks(np.zeros((16, 4096), np.float32), Kind[kind])
    numbers, scales, minimums = read_blocks(kind, rows)
    values = numbers.view(torch.int8).float().view(16, scales.shape[1], -1) * scales[:, :, None]
    values = values if minimums is None else values + minimums[:, :, None]
    assert torch.equal(values.view(16, -1), torch.from_numpy(gguf.quants.dequantize(rows, Kind[kind])))
    assert len(numbers.unique()) == {"4": 16, "5": 32, "6": 64, "8": 256}[kind[1]]


@needs_c
@pytest.mark.parametrize(
    "kind", [Kind.Q2_K, Kind.Q3_K, Kind.IQ2_XXS, Kind.IQ3_S, Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4], ids=lambda kind: kind.name
)
def test_other_types_are_dequantised_by_the_package(tmp_path: Path, kind: Kind) -> None:
    path = write(tmp_path / "model.gguf", "", "llama", kind, random_model("Llama", BASE | BLOCK_SIZES, seed=1))
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    model = open_checkpoint(path, torch.float32).load("cpu")
    for name, parameter in (("ffn_down", "down"), ("attn_output", "output")):
        values = torch.from_numpy(gguf.quants.dequantize(stored[f"blk.0.{name}.weight"], kind))
        assert torch.equal(model.layers[0].get_parameter(parameter), values) and len(values.unique()) > 8
    with pytest.raises(ValueError, match=rf"model.embed_tokens.weight: got type {kind.name} and shape \(160, 256\), expected one of Q4_0"):
        open_checkpoint(path, torch.float32, "quantised")


def test_a_model_in_several_files_is_read_from_the_first(tmp_path: Path) -> None:
    """As llama.cpp divides them. The other files have no metadata of the model."""
    write(tmp_path / "model.gguf", "llama-2", "llama", tensors_per_file=15)
    first, *others = sorted(tmp_path.glob("*.gguf"))
    assert first.name == "model-00001-of-00003.gguf" and "llama.block_count" not in read_gguf_header(others[0]).metadata
    whole = write(tmp_path / "whole.gguf", "llama-2", "llama")
    assert torch.equal(logits_of(first), logits_of(whole))
    with pytest.raises(ValueError, match=r"model-00002-of-00003.gguf: got part 1 of 3, expected the first, NAME-00001-of-00003.gguf"):
        open_checkpoint(others[0])
    with pytest.raises(ValueError, match=r"renamed.gguf: got part 0 of 3, expected the first, NAME-00001-of-00003.gguf"):
        open_checkpoint(shutil.copy(first, tmp_path / "renamed.gguf"))
    shutil.copy(others[0], others[1])
    with pytest.raises(ValueError, match=r"model-00003-of-00003.gguf: got the tensor 'blk.* twice"):
        open_checkpoint(first)
    others[1].unlink()
    with pytest.raises(ValueError, match=r"model-00003-of-00003.gguf: No such file or directory"):
        open_checkpoint(first)


def test_a_number_of_files_takes_no_memory(tmp_path: Path) -> None:
    def add_split(writer: gguf.GGUFWriter) -> None:
        writer.add_uint16("split.no", 0)
        writer.add_uint64("split.count", 10**15)

    path = write_gguf(tmp_path / f"model-00001-of-{10**15}.gguf", "llama", add_split)
    with pytest.raises(ValueError, match=rf"model-00002-of-{10**15}.gguf: No such file or directory"):
        open_checkpoint(path)


@needs_c
def test_weights_that_stay_quantised_are_not_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "model.gguf", "llama-2", "llama", Kind.Q4_1)
    kinds, dequantise = set[Kind](), gguf.quants.dequantize

    def noted(blocks: npt.NDArray[np.uint8], kind: Kind) -> npt.NDArray[np.float32]:
        kinds.add(kind)
        return dequantise(blocks, kind)

    monkeypatch.setattr(gguf.quants, "dequantize", noted)
    cases: dict[WeightsMode, set[Kind]] = {"quantised": {Kind.F32}, "dequantised": {Kind.F32, Kind.Q4_1}}
    for weights, expected in cases.items():
        kinds.clear()
        open_checkpoint(path, torch.float32, weights).load("cpu")
        assert kinds == expected


@needs_c
@pytest.mark.parametrize("kind", BLOCK_LAYOUTS)
def test_a_scale_of_infinity_is_refused(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "model.gguf", "llama-2", "llama", Kind[kind], random_model("Llama", BASE | BLOCK_SIZES, seed=1))
    rows = next(tensor for tensor in gguf.GGUFReader(path, "r+").tensors if tensor.name == "blk.0.ffn_down.weight").data
    block = rows[3, : gguf.GGML_QUANT_SIZES[Kind[kind]][1]]
    block[scale_bytes(Kind[kind])][:2] = np.array([np.inf], np.float16).view(np.uint8)
    for weights in ("quantised", "dequantised"):
        refused = pytest.raises(ValueError, match=r"layers\.0\.mlp\.down_proj\.weight holds NaN or infinity")
        with np.errstate(invalid="ignore"), refused:
            open_checkpoint(path, torch.float32, weights).load("cpu")


def as_often_mixed(name: str) -> Kind:
    return Kind.Q6_K if "v_proj" in name or "down_proj" in name or "embed" in name else Kind.Q4_K


@pytest.mark.parametrize("kind", [*(pytest.param(Kind[name], id=name) for name in BLOCK_LAYOUTS), pytest.param(as_often_mixed, id="mixed")])
@needs_c
def test_weights_that_stay_quantised_have_the_bits_of_the_reference(tmp_path: Path, kind: Kind | Callable[[str], Kind]) -> None:
    """`gguf.quants.dequantize` is the reference: it fills the parameters of the dequantised model."""
    path = write(tmp_path / "model.gguf", "", "llama", kind, random_model("Llama", BASE | BLOCK_SIZES, seed=1))
    kept, plain = (open_checkpoint(path, torch.float32, weights).load("cpu") for weights in ("quantised", "dequantised"))
    matrices = [name for name, parameter in plain.named_parameters() if parameter.dim() == 2]
    assert len(matrices) == 6
    for name in matrices:
        assert torch.equal(unpack(kept.get_parameter(name)), plain.get_parameter(name)), name
    torch.testing.assert_close(CachedModel(kept).run(TOKENS, 0, 40), CachedModel(plain).run(TOKENS, 0, 40), rtol=1e-4, atol=1e-4)


def experts_model(family: str) -> Any:
    experts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1, "sliding_window": None}
    return random_model(family, BASE | sizes | experts, seed=1)


with_experts = pytest.mark.parametrize(("family", "name"), [("Mixtral", "llama"), ("Qwen3Moe", "qwen3moe")])


@with_experts
def test_gguf_logits_of_experts_equal_the_source_model(tmp_path: Path, family: str, name: str) -> None:
    model = experts_model(family)
    with torch.no_grad():
        found, answer = logits_of(write(tmp_path / "model.gguf", "", name, None, model)), model(TOKENS).logits
    assert float((found - answer).abs().max() / answer.abs().max()) < 1e-4


def test_gguf_without_a_base_of_frequencies_has_that_of_llama_cpp(tmp_path: Path) -> None:
    """Mixtral's default in `transformers` is another one."""
    path = write(tmp_path / "model.gguf", "", "llama", None, experts_model("Mixtral"))
    path.write_bytes(path.read_bytes().replace(b"llama.rope.freq_base", b"llama.rope.freq_bxse"))
    assert open_checkpoint(path).config.rope.theta == 10_000


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_K, as_often_mixed])
@with_experts
@needs_c
def test_experts_that_stay_quantised_have_the_bits_of_the_reference(
    tmp_path: Path, family: str, name: str, kind: Kind | Callable[[str], Kind]
) -> None:
    """Each weight is stored in one tensor for all experts. The router is not quantised."""
    path = write(tmp_path / "model.gguf", "", name, kind, experts_model(family))
    kept, plain = (open_checkpoint(path, torch.float32, weights).load("cpu") for weights in ("quantised", "dequantised"))
    for part in ("gate_up", "down"):
        found, expected = (model.get_parameter(f"layers.0.experts.{part}") for model in (kept, plain))
        assert found.dtype is torch.uint8 and found.nbytes < expected.nbytes // 2
        assert torch.equal(unpack(found), expected)
    assert kept.get_parameter("layers.0.experts.router").dtype is torch.float32
    whole, parts = CachedModel(kept).run(TOKENS, 0, 40)[0], CachedModel(kept)
    torch.testing.assert_close(whole, CachedModel(plain).run(TOKENS, 0, 40)[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(parts.in_chunks(TOKENS, 7), whole), "a row depends on others"


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
@needs_c
def test_weights_that_stay_quantised_have_the_logits_of_dequantised_ones(tmp_path: Path, kind: Kind) -> None:
    path = write(tmp_path / "model.gguf", "llama-2", "llama", kind)
    kept = open_checkpoint(path, torch.float32, "quantised").load("cpu")
    found, answer = CachedModel(kept).run(TOKENS, 0, 40)[0], logits_of(path)
    assert kept.layers[0].get_parameter("qkv").dtype is torch.uint8
    torch.testing.assert_close(found, answer, rtol=1e-4, atol=1e-4 * float(answer.abs().max()))  # another order of float32 sums
    values = {
        name: stored.shape[0] * stored.shape[-1]
        for name, stored in open_checkpoint(path).source.tensors.items()
        if stored.kind == kind.name
    }
    packed = sum(parameter.nbytes for parameter in kept.parameters() if parameter.dtype is torch.uint8)
    assert packed == sum(values.values()) * gguf.GGML_QUANT_SIZES[kind][1] // 32 > 0


@needs_c
def test_greedy_texts_of_weights_that_stay_quantised(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama-2", "llama", Kind.Q4_1)
    config, texts = EngineConfig(max_rows=2, num_speculative_tokens=2, max_length=64), []
    for weights in ("quantised", "dequantised"):
        with Engine.from_pretrained(path, "ngram", config=config, dtype=torch.float32, weights=weights) as engine:
            jobs = [engine.submit(prompt, max_new_tokens=20) for prompt in ([5, 6, 7], [9] * 30)]
            list(engine.stream())
            texts.append([job.tokens for job in jobs])
    assert texts[0] == texts[1] and len(texts[0][0]) > 1


@needs_c
def test_quantised_weights_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama-2", "llama", lambda name: Kind.Q8_0 if "q_proj" in name else Kind.F16)
    with pytest.raises(ValueError, match=r"model.gguf: model.\S+q_proj.weight: got type Q8_0 and shape .* expected one of Q4_0, Q4_1"):
        Engine.from_pretrained(path, weights="quantised")
    entry = b"blk.0.attn_norm.weight" + struct.pack("<IQ", 1, 64)
    content = write(path, "llama-2", "llama", Kind.Q8_0).read_bytes()
    path.write_bytes(content.replace(entry + bytes(4), entry + struct.pack("<I", Kind.Q8_0)))
    with pytest.raises(ValueError, match=r"model.layers.0.input_layernorm.weight: got type Q8_0 and shape \(64,\), expected one of"):
        Engine.from_pretrained(path, weights="quantised")
    with pytest.raises(ValueError, match="weights: got 'int4', expected"):
        Engine.from_pretrained(path, weights="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weights: got 'quantised', expected 'dequantised': the product in C is not available"):
        Engine.from_pretrained(path, weights="quantised", dtype=torch.float16)


def test_gguf_vocabulary_and_config(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "model.gguf", "smollm2", "llama"))
    vocabulary, config = checkpoint.vocabulary, checkpoint.config
    assert (config.tied, config.dtype, config.max_positions, config.vocab_size) == (True, torch.bfloat16, 512, 160)
    assert vocabulary.tokens[159] == b" a" and vocabulary.tokens[3] == b"<call>" and vocabulary.stop_token_ids == (2,)
    assert set(vocabulary.control_token_ids) == {0, 1}


def test_broken_gguf_files_are_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", "llama-2", "llama")
    content = whole.read_bytes()
    broken = tmp_path / "broken.gguf"
    for share in (0.0, 0.0001, 0.01, 0.5, 0.99):
        broken.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(ValueError, match=r"broken.gguf: not a complete GGUF file"):
            open_checkpoint(broken)
    broken.write_bytes(content.replace(b"llama.block_count", b"llama.block_cxunt"))
    with pytest.raises(ValueError, match="num_hidden_layers: got None"):
        open_checkpoint(broken)
    broken.write_bytes(content.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"))
    with pytest.raises(ValueError, match=r"got the tensor 'blk.1.attn_x.weight', which a model of the Llama family"):
        open_checkpoint(broken)
    broken.write_bytes(content.replace(b"blk.1.attn_q.weight", b"blk.7.attn_q.weight"))
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn.q_proj.weight is missing"):
        open_checkpoint(broken)
    content = write(whole, "qwen3", "qwen3").read_bytes()
    broken.write_bytes(content.replace(b"attention.key_length", b"rope.dimension_count"))
    with pytest.raises(ValueError, match=r"broken.gguf: qwen3.rope.dimension_count: got 32, expected 16, the size of a head"):
        open_checkpoint(broken)


HEADER = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a"  # one metadata entry; its value comes next


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (struct.pack("<IIQ", 9, 4, 1 << 60), "array values, expected at most"),
        (struct.pack("<IIQ", 9, 4, 1000), "the file ends at byte 49, inside a value of 4000 bytes that starts at byte 49"),
        (struct.pack("<IIQQ", 9, 8, 1000, 1) + b"b", "the file ends at byte 58, inside a value of 8 bytes that starts at byte 58"),
        (struct.pack("<IIQI", 9, 9, 1, 9), "got a value of type 9"),
        (struct.pack("<IQ", 8, 1 << 63), "the file ends at byte 45, inside a value"),
        (struct.pack("<IQ", 8, 2) + b"\xff\xfe", "the text at byte 45 is not UTF-8"),
        (struct.pack("<I", 77), "got a value of type 77"),
    ],
)
def test_wrong_lengths_in_the_header_are_refused(tmp_path: Path, value: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(HEADER + value)
    with pytest.raises(ValueError, match=f"model.gguf: not a complete GGUF file: .*{message}"):
        open_checkpoint(path)


def test_the_header_equals_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama-2", "llama", Kind.Q8_0)
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == fields
    tensors = {tensor.name: (tuple(tensor.shape[::-1].tolist()), tensor.tensor_type, tensor.data_offset) for tensor in reader.tensors}
    assert {name: tuple(tensor) for name, tensor in header.tensors.items()} == tensors


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="expected GGUF and version 2 or 3, little-endian"):
        open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (struct.pack("<Q11sIQIQ", 11, b"output.weig", 1, 32, 0, 0), "got the tensor 'output.weig' twice"),
        (struct.pack("<Q10sIQIQ", 10, b"blk.weight", 1, 32, 0, 0), "which a model of the Llama family does not have"),
        (struct.pack("<Q13sIQIQ", 13, b"output.weight", 1, 32, 99, 0), "output.weight: got tensor type 99, which is unknown"),
        (struct.pack("<Q13sIQIQ", 13, b"output.weight", 1, 31, 8, 0), r"got shape \(31,\), expected rows of a multiple of 32 values"),
        (struct.pack("<Q13sIIQ", 13, b"output.weight", 0, 0, 0), r"got shape \(\), expected rows"),
        (struct.pack("<Q13sIQIQ", 13, b"output.weight", 1, 32, 0, 1 << 40), "output.weight ends at byte"),
        (struct.pack("<Q13sIQIQ", 13, b"output.weight", 1, 1 << 60, 0, 0), "output.weight ends at byte"),
        (struct.pack("<Q13sIQQIQ", 13, b"output.weight", 2, 32, 0, 0, 0), r"got shape \(0, 32\), expected rows"),
    ],
)
def test_wrong_tensor_tables_are_refused(tmp_path: Path, table: bytes, message: str) -> None:
    path, count = tmp_path / "model.gguf", 2 if "twice" in message else 1
    architecture = struct.pack("<Q20sIQ5s", 20, b"general.architecture", 8, 5, b"llama")
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, count, 1) + architecture + table * count + bytes(64))
    with pytest.raises(ValueError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("kind", "entry", "message"),
    [
        ("gemma", None, "general.architecture: got 'gemma', expected one of llama, qwen2, qwen3"),
        (["llama"], None, r"general.architecture: got \['llama'\], expected one of llama, qwen2, qwen3"),
        ("llama", ("llama.rope.scaling.type", "longrope"), "rope.scaling.type: got 'longrope', expected one of 'none', 'linear', 'yarn'"),
        ("llama", ("llama.rope.scaling.attn_factor", 1.5), "llama.rope.scaling.attn_factor: got 1.5, expected one of None, 1.0"),
        ("llama", ("llama.rope.scaling.yarn_beta_fast", 16.0), "llama.rope.scaling.yarn_beta_fast: got 16.0, expected one of None, 32.0"),
    ],
)
def test_unsupported_gguf_models_are_refused(tmp_path: Path, kind: Any, entry: tuple[str, Any] | None, message: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", kind if isinstance(kind, str) else "")
    if not isinstance(kind, str):
        writer.kv_data[0].clear()
        writer.add_array("general.architecture", kind)
    if entry:
        (writer.add_string if isinstance(entry[1], str) else writer.add_float32)(*entry)
    else:
        writer.add_tensor("blk.0.post_ffw_norm.weight", np.zeros(32, np.float32))  # of Gemma; the error names the architecture
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path / "other.gguf")


def test_random_damage_raises_value_errors_only(tmp_path: Path) -> None:
    whole = write(tmp_path / "model.gguf", "llama-2", "llama").read_bytes()
    assert count_refused_damaged(tmp_path / "model.gguf", whole, 6000, tmp_path / "model.gguf") > 20
