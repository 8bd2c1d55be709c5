"""Quantised folders: weights have the values of each format's formula, kept quantised or not; other schemes are refused by field."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from stepgraph import Engine, EngineConfig
from stepgraph.graphs.layers.quantised import unpack
from stepgraph.runtime.cli import main
from stepgraph.runtime.models.files.checkpoint import WeightsMode, open_checkpoint
from stepgraph.runtime.models.files.quantised_folder import QuantisedSource, read_scheme
from stepgraph.runtime.models.files.weights import SafetensorsSource
from tests.helpers.c_library import needs_c
from tests.helpers.families import BASE, CachedModel, random_model, save

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
Written = tuple[dict[str, Tensor], Tensor]  # tensors by name suffix, and the weight that they represent


def words_of(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """The documented packing: numbers of 32 / len(order) bits along the last dimension; number order[i] in the i-th field from below."""
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % len(order)))
    words = torch.zeros(*numbers.shape[:-1], numbers.shape[-1] // len(order), dtype=torch.int64)
    for field, column in enumerate(order):
        words += numbers[..., column :: len(order)].long() << 32 // len(order) * field
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def fp8(weight: Tensor, rows: int, columns: int, name: str = "weight_scale") -> Written:
    """One scale for each block of this size; the last blocks may have fewer rows."""
    scales = torch.stack([torch.stack([block.abs().max() for block in each.split(columns, 1)]) for each in weight.split(rows)]) / 448
    numbers = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    dense = torch.empty_like(weight)
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            place = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
            numbers[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
            dense[place] = numbers[place].float() * scales[row, column]
    return {"weight": numbers, name: scales[0] if scales.numel() == 1 else scales}, dense


def integers(
    weight: Tensor, group: int, symmetric: bool, bits: int = 4, scale_type: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers, scales, zero points [out, groups], and the weight. Some numbers are clamped, so the least and the largest occur."""
    groups, most = weight.view(len(weight), -1, group), (1 << bits) - 1
    scales = ((groups.amax(2) - groups.amin(2)) / most).to(scale_type)
    zeros = torch.full_like(scales, 1 << bits - 1) if symmetric else (-groups.amin(2) / scales).round().clamp(0, most)
    numbers = (groups / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, most)
    dense = (numbers.double() - zeros.double()[:, :, None]) * scales.double()[:, :, None]
    return numbers.view(weight.shape), scales, zeros, dense.view(weight.shape).float()


def pack_quantized(weight: Tensor, group: int, symmetric: bool, bits: int = 4, scale_type: torch.dtype = torch.float16) -> Written:
    numbers, scales, zeros, dense = integers(weight, group, symmetric, bits, scale_type)
    order = tuple(range(32 // bits))
    tensors = {"weight_packed": words_of(numbers, order), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    return tensors | ({} if symmetric else {"weight_zero_point": words_of(zeros.T, order).T.contiguous()}), dense


def awq(weight: Tensor) -> Written:
    numbers, scales, zeros, dense = integers(weight, 128, False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": words_of(numbers.T, order), "qzeros": words_of(zeros.T, order), "scales": scales.T.contiguous()}, dense


def gptq(weight: Tensor, group: int, less: int, bits: int = 4) -> Written:
    """less: subtracted from the words of zero points, as GPTQModel does; a row of positive weights has the zero point 0, which borrows."""
    weight = torch.cat([weight[:1].abs() + 0.1, weight[1:]])
    numbers, scales, zeros, dense = integers(weight, group, False, bits)
    order, fields = torch.arange(weight.shape[1], dtype=torch.int32) // group, tuple(range(32 // bits))
    tensors = {
        "qweight": words_of(numbers, fields).T.contiguous(),
        "qzeros": words_of(zeros.T, fields) - less,
        "scales": scales.T.contiguous(),
    }
    return tensors | {"g_idx": order}, dense


def int8(weight: Tensor, rows: int) -> Written:
    """One scale per row, or one for `rows` rows."""
    scales = torch.stack([block.abs().max() for block in weight.split(rows)]).to(torch.bfloat16)[:, None] / 127
    numbers = (weight.float() / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": numbers, "weight_scale": scales if len(scales) > 1 else scales[0]}, numbers.float() * scales.float()


def compressed(layout: str, inputs: object = None, **weights: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


FLOAT8, INT4, INT8 = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "int"}, {"num_bits": 8, "type": "int"}
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False}
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Written]]] = {
    "FP8 per tensor": (compressed("float-quantized", FLOAT8, strategy="tensor", **FLOAT8), lambda weight: fp8(weight, *weight.shape)),
    "FP8 per channel": (compressed("float-quantized", strategy="channel", **FLOAT8), lambda weight: fp8(weight, 1, weight.shape[1])),
    "FP8 in blocks": (
        compressed("float-quantized", strategy="block", block_structure=[128, 128], **FLOAT8),
        lambda weight: fp8(weight, min(128, len(weight)), 128),
    ),
    "FP8 as DeepSeek": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        lambda weight: fp8(weight, min(128, len(weight)), 128, "weight_scale_inv"),
    ),
    "pack-quantized": (compressed("pack-quantized", strategy="group", group_size=128, **INT4), lambda w: pack_quantized(w, 128, True)),
    "pack-quantized, zero points": (
        compressed("pack-quantized", strategy="group", group_size=32, symmetric=False, **INT4),
        lambda weight: pack_quantized(weight, 32, False),
    ),
    "pack-quantized per channel": (
        compressed("pack-quantized", strategy="channel", **INT4),
        lambda weight: pack_quantized(weight, weight.shape[1], True),
    ),
    "pack-quantized, 8 bits": (
        compressed("pack-quantized", strategy="group", group_size=32, **INT8),
        lambda weight: pack_quantized(weight, 32, True, 8),
    ),
    "pack-quantized, 8 bits per channel": (
        compressed("pack-quantized", strategy="channel", **INT8),
        lambda weight: pack_quantized(weight, weight.shape[1], True, 8),
    ),
    "pack-quantized, 8 bits, zero points": (
        compressed("pack-quantized", strategy="group", group_size=64, symmetric=False, **INT8),
        lambda weight: pack_quantized(weight, 64, False, 8),
    ),
    "pack-quantized, 8 bits, scales in bfloat16": (
        compressed("pack-quantized", strategy="group", group_size=128, **INT8),
        lambda weight: pack_quantized(weight, 128, True, 8, torch.bfloat16),
    ),
    "8 bits per channel, activations too": (compressed("int-quantized", INT8, strategy="channel", **INT8), lambda weight: int8(weight, 1)),
    "8 bits per tensor": (compressed("int-quantized", strategy="tensor", symmetric=True, **INT8), lambda weight: int8(weight, len(weight))),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}, awq),
    "GPTQ": (GPTQ | {"group_size": 64}, lambda weight: gptq(weight, 64, 0x11111111)),
    "GPTQ, 8 bits": (GPTQ | {"bits": 8, "group_size": 128}, lambda weight: gptq(weight, 128, 0x01010101, 8)),
    "GPTQ, second format": (GPTQ | {"group_size": 128, "checkpoint_format": "gptq_v2"}, lambda weight: gptq(weight, 128, 0)),
}


def write(folder: Path, layout: str, model: Any = None) -> dict[str, Tensor]:
    """Returns the dequantised weights by their names in a plain folder. model: from `transformers`; None: a random Llama."""
    config, quantise = LAYOUTS[layout]
    save(model or random_model("Llama", BASE | SIZES, seed=1), folder)
    dense = load_file(folder / "model.safetensors")
    stored = dict(dense)  # small routers stay as they are
    for name in [name for name, tensor in dense.items() if ".layers." in name and tensor.dim() == 2 and len(tensor) > 8]:
        parts, dense[name] = quantise(stored.pop(name))
        stored |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    save_file(stored, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"quantization_config": config}), encoding="utf-8")
    return dense


@pytest.mark.parametrize("layout", LAYOUTS)
@needs_c
def test_quantised_folders_have_the_weights_of_their_formula(tmp_path: Path, layout: str) -> None:
    dense = write(tmp_path, layout)
    checkpoint = open_checkpoint(tmp_path, torch.float32)
    assert checkpoint.source.tensors.keys() == dense.keys()
    for name, weight in dense.items():
        assert torch.equal(checkpoint.source.read(name), weight), name
    plain = checkpoint.load("cpu")
    kept = open_checkpoint(tmp_path, torch.float32, "quantised")
    model = kept.load("cpu")
    assert set(kept.packed) == {f"layers.0.{name}" for name in ("qkv", "output", "gate_up", "down")}
    for name in kept.packed:
        assert torch.equal(unpack(model.get_parameter(name)), plain.get_parameter(name)), name
    bits = 8.25 if "FP8" in layout else 6 if layout in ("GPTQ", "pack-quantized, zero points") else 4.5
    if "8 bits" in layout:
        bits = 8.5 if layout in ("pack-quantized, 8 bits", "pack-quantized, 8 bits per channel") else 10
    assert all(model.get_parameter(name).nbytes == plain.get_parameter(name).nbytes * bits / 32 for name in kept.packed)
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(CachedModel(model).run(tokens, 0, 40), CachedModel(plain).run(tokens, 0, 40), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_equals_its_slice_of_the_weight_and_reads_no_other_numbers(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of rows or columns may begin and end within words of eight numbers and within groups."""
    dense = write(tmp_path, layout)
    source, read = open_checkpoint(tmp_path, torch.float32).source, list[Tensor]()
    assert isinstance(source, QuantisedSource)
    real_read = SafetensorsSource.read

    def noted(tensor: Tensor) -> Tensor:
        read.append(tensor)
        return tensor

    monkeypatch.setattr(SafetensorsSource, "read", lambda self, *part: noted(real_read(self, *part)))
    for name, part in itertools.product(dense, (slice(0, 32), slice(32, 64), slice(5, 23), slice(63, 64))):
        for dim in range(dense[name].dim()):
            read.clear()
            assert torch.equal(source.read(name, dim, part), dense[name].movedim(dim, 0)[part].movedim(0, dim)), (name, dim, part)
            numbers = dense[name].numel() // dense[name].shape[dim] * (part.stop - part.start + 14)  # and the rest of two words
            assert sum(each.nbytes for each in read if each.dtype in (torch.int32, torch.float8_e4m3fn)) <= numbers + 2048, (name, dim)


@pytest.mark.parametrize("layout", ["GPTQ", "pack-quantized, zero points", "pack-quantized, 8 bits, zero points"])
def test_zero_points_may_not_fill_their_last_word(tmp_path: Path, layout: str) -> None:
    model = random_model("Llama", BASE | SIZES | {"num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 10}, seed=1)
    dense, source = write(tmp_path, layout, model), open_checkpoint(tmp_path, torch.float32).source
    assert all(torch.equal(source.read(name), weight) for name, weight in dense.items())


def in_any_order(layout: str, bits: int) -> Callable[[Tensor], Written]:
    """Columns are quantised in a random order, and stored in their own."""

    def write_one(weight: Tensor) -> Written:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.numel()))
        numbers, scales, zeros, dense = integers(weight[:, order], 64, False, bits)
        back, fields = order.argsort(), tuple(range(32 // bits))
        groups = (torch.arange(weight.shape[1], dtype=torch.int32) // 64)[back]
        if layout == "gptq":
            tensors = {"qweight": words_of(numbers[:, back]).T.contiguous(), "qzeros": words_of(zeros.T), "g_idx": groups}
            return tensors | {"scales": scales.T.contiguous()}, dense[:, back]
        tensors = {"weight_packed": words_of(numbers[:, back], fields), "weight_scale": scales, "weight_g_idx": groups}
        zero_points = words_of(zeros.T, fields).T.contiguous()
        return tensors | {"weight_shape": torch.tensor(weight.shape), "weight_zero_point": zero_points}, dense[:, back]

    return write_one


ORDERED: dict[str, Any] = {"strategy": "group", "group_size": 64, "symmetric": False, "actorder": "group"}
ANY_ORDER = {
    "GPTQ": (GPTQ | {"group_size": 64, "desc_act": True, "checkpoint_format": "gptq_v2"}, in_any_order("gptq", 4)),
    "pack-quantized": (compressed("pack-quantized", **ORDERED, **INT4), in_any_order("pack-quantized", 4)),
    "pack-quantized, 8 bits": (compressed("pack-quantized", **ORDERED, **INT8), in_any_order("pack-quantized", 8)),
}


@pytest.mark.parametrize("layout", ANY_ORDER)
@needs_c
def test_groups_in_any_order_have_the_weights_of_their_formula(tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYOUTS, layout, ANY_ORDER[layout])
    dense, name = write(tmp_path, layout), "model.layers.0.mlp.down_proj"
    source = open_checkpoint(tmp_path, torch.float32).source
    assert isinstance(source, QuantisedSource)
    for key, weight in dense.items():
        assert torch.equal(source.read(key), weight), key
    for dim, part in itertools.product((0, 1), (slice(5, 23), slice(32, 64))):
        assert torch.equal(source.read(f"{name}.weight", dim, part), dense[f"{name}.weight"].movedim(dim, 0)[part].movedim(0, dim))
    with pytest.raises(ValueError, match=r"q_proj.weight: got type INT_ORDERED and shape \(128, 128\), expected one of Q4_0"):
        open_checkpoint(tmp_path, torch.float32, "quantised")
    tensors, groups = load_file(tmp_path / "model.safetensors"), f"{name}.{'g_idx' if layout == 'GPTQ' else 'weight_g_idx'}"
    save_file(tensors | {groups: tensors[groups] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{groups}: got 1 to 4, expected groups from 0 to 3"):
        open_checkpoint(tmp_path, torch.float32).load("cpu")
    save_file({key: tensor for key, tensor in tensors.items() if key != groups}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{groups}: got no tensor \(\), expected I32 \(256,\)"):
        open_checkpoint(tmp_path, torch.float32)


def test_biases_of_zeros_are_accepted(tmp_path: Path) -> None:
    """AutoGPTQ stores one beside every weight."""
    write(tmp_path, "GPTQ")
    tensors, bias = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.up_proj.bias"
    before = open_checkpoint(tmp_path, torch.float32).load("cpu").state_dict()
    zeros = {name.replace("qweight", "bias"): torch.zeros(tensor.shape[1]) for name, tensor in tensors.items() if name.endswith("qweight")}
    save_file(tensors | zeros, tmp_path / "model.safetensors")
    after = open_checkpoint(tmp_path, torch.float32).load("cpu").state_dict()
    assert len(zeros) == 7 and before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    save_file(tensors | zeros | {bias: zeros[bias] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"got 1 tensors that the config does not account for, such as {bias}"):
        open_checkpoint(tmp_path, torch.float32)


EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "mlp_only_layers": [1]},
    "DeepseekV3": {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_group": 2, "topk_group": 1}
    | {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 4}
    | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "head_dim": 16},
}


def experts(kind: str) -> Any:
    return random_model(kind, BASE | SIZES | {"num_hidden_layers": 2, "head_dim": 32} | EXPERTS[kind], seed=2)


@needs_c
@pytest.mark.parametrize("layout", ["AWQ", "GPTQ", "GPTQ, second format", "pack-quantized", "FP8 as DeepSeek"])
@pytest.mark.parametrize("kind", EXPERTS)
def test_quantised_experts_have_the_logits_of_transformers(tmp_path: Path, kind: str, layout: str) -> None:
    """`transformers` computes with the dequantised weights."""
    tokens, model = torch.arange(40)[None], experts(kind)
    dense = write(tmp_path / "quantised", layout, model)
    save(model, tmp_path / "dense")
    save_file(dense, tmp_path / "dense/model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        expected = type(model).from_pretrained(tmp_path / "dense")(tokens).logits
    for weights in ("quantised", "dequantised"):
        opened = open_checkpoint(tmp_path / "quantised", torch.float32, weights)
        assert any("experts.down" in name for name in opened.packed) == (weights == "quantised")
        logits, _ = CachedModel(opened.load("cpu")).run(tokens, 0, 40)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@needs_c
@pytest.mark.parametrize("kind", [None, *EXPERTS])
def test_an_engine_runs_a_quantised_folder(tmp_path: Path, kind: str | None) -> None:
    write(tmp_path, "AWQ", kind and experts(kind))
    config, texts = EngineConfig(max_rows=2, num_speculative_tokens=2, max_length=64), []
    for weights in ("quantised", "dequantised"):
        with Engine.from_pretrained(tmp_path, "ngram", config=config, weights=weights) as engine:
            texts.append(engine.generate([5, 6, 7], max_new_tokens=20).tokens)
    assert texts[0] == texts[1] and len(texts[0]) > 1


@needs_c
def test_a_folder_as_deepseek_publishes_it_runs_with_its_own_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FP8 in blocks. The MTP module is stored as the layer after the last one, with copies of the target's embedding and lm_head."""
    fields = BASE | SIZES | EXPERTS["DeepseekV3"] | {"num_hidden_layers": 3}
    write(tmp_path, "FP8 as DeepSeek", random_model("DeepseekV3", fields, seed=2))
    tensors, made = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(1)
    own = {f"{name}.weight": 1 + 0.3 * torch.randn(128, generator=made) for name in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj.weight"] = torch.randn(128, 256, generator=made) / 16
    own["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    own["shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | {f"model.layers.2.{name}": tensor for name, tensor in own.items()}, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    stated = json.loads(path.read_text(encoding="utf-8")) | {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    path.write_text(json.dumps(stated), encoding="utf-8")
    config, texts = EngineConfig(max_rows=2, num_speculative_tokens=2, max_length=64), []
    cases: tuple[tuple[str, WeightsMode], ...] = (("none", "dequantised"), ("none", "quantised"), ("auto", "quantised"))
    for draft, weights in cases:
        with Engine.from_pretrained(tmp_path, draft, config=config, weights=weights, implementation="native") as engine:
            assert ("draft: MTP" in " ".join(engine.notes)) == (draft == "auto")
            texts.append(engine.generate([5, 6, 7], max_new_tokens=20).tokens)
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) > 1
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(way["implementation"], way["weights"]) for way in document["runs"]] == [("native", "dequantised"), ("native", "quantised")]
    assert document["drafters"][0] == "mtp (MTP, up to 8 drafts; 3.7 MiB in float32)"
    assert "quantization_config" in document["refused"]["transformers, dequantised"]


@needs_c
def test_inspect_reports_quantised_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "FP8 in blocks")
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["stored"] == {"F32": 5, "FP8": 7}
    kept = open_checkpoint(tmp_path, weights="quantised").load("cpu")
    packed = sum(parameter.nbytes for parameter in kept.parameters() if parameter.dtype is torch.uint8)
    assert [way["bytes"].get("float8 in groups of 128", 0) for way in document["runs"]] == [0, packed]
    assert "quantization_config" in document["refused"]["transformers, dequantised"]


def write_mxfp4(folder: Path, model: Any) -> None:
    """The layout of the published GPT-OSS: random numbers and powers for the experts."""
    save(model, folder)
    draw, tensors = torch.Generator().manual_seed(1), load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, outer, inner // 32, 16), generator=draw).to(torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 125, (experts, outer, inner // 32), generator=draw).to(torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path, scheme = folder / "config.json", {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"quantization_config": scheme}), encoding="utf-8")


def gpt_oss() -> Any:
    return random_model(
        "GptOss", BASE | SIZES | {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}, seed=2
    )


@needs_c
def test_mxfp4_of_gpt_oss_has_the_values_and_logits_of_transformers(tmp_path: Path) -> None:
    model, tokens = gpt_oss(), torch.arange(40)[None]
    write_mxfp4(tmp_path, model)
    checkpoint, stored = open_checkpoint(tmp_path, torch.float32), load_file(tmp_path / "model.safetensors")
    for name in ("gate_up_proj", "down_proj"):
        key = f"model.layers.0.mlp.experts.{name}"
        expected = convert_moe_packed_tensors(stored[f"{key}_blocks"], stored[f"{key}_scales"], dtype=torch.float32)
        assert torch.equal(checkpoint.source.read(key).float(), expected) and len(expected.unique()) == 27
        assert isinstance(checkpoint.source, QuantisedSource)
        for dim, part in ((0, slice(1, 3)), (1, slice(5, 23)), (2, slice(5, 23))):
            assert torch.equal(checkpoint.source.read(key, dim, part).float(), expected.movedim(dim, 0)[part].movedim(0, dim))
        model.model.layers[0].mlp.experts.get_parameter(name).data = expected
    with torch.no_grad():
        answer = model(tokens).logits
    torch.testing.assert_close(CachedModel(checkpoint.load("cpu")).run(tokens, 0, 40)[0], answer, rtol=1e-4, atol=1e-4)

    with pytest.raises(ValueError, match=r"experts.gate_up_proj: got type MXFP4 and shape \(4, 128, 512\), expected one of Q4_0"):
        open_checkpoint(tmp_path, weights="quantised")


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("blocks", lambda tensor: tensor[..., :8], r"blocks: got U8 \(4, 128, 8, 8\), expected U8 \(4, 128, 8, 16\)"),
        ("blocks", lambda tensor: tensor[0], r"blocks: got U8 \(128, 8, 16\), expected U8"),
        ("scales", lambda tensor: tensor[:3], r"scales: got U8 \(3, 128, 8\), expected U8 \(4, 128, 8\)"),
        ("scales", lambda tensor: tensor.int(), r"scales: got I32 \(4, 128, 8\), expected U8"),
        ("scales", lambda tensor: None, r"scales: got no tensor \(\), expected U8"),
    ],
)
def test_broken_mxfp4_is_refused(tmp_path: Path, part: str, change: Callable[[Tensor], Tensor | None], message: str) -> None:
    write_mxfp4(tmp_path, gpt_oss())
    tensors, name = load_file(tmp_path / "model.safetensors"), f"model.layers.0.mlp.experts.down_proj_{part}"
    found = change(tensors.pop(name))
    save_file(tensors if found is None else tensors | {name: found.contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"layers.0.mlp.experts.down_proj_{message}"):
        open_checkpoint(tmp_path)


def changed(config: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(config))
    *outer, last = path.split(".")
    inner = found
    for name in outer:
        inner = inner[name]
    inner[last] = value
    return found


@pytest.mark.parametrize(
    ("layout", "field", "value"),
    [
        ("AWQ", "quant_method", "bitsandbytes"),
        ("AWQ", "bits", 8),
        ("AWQ", "version", "gemv"),
        ("AWQ", "group_size", 48),
        ("AWQ", "group_size", True),
        ("GPTQ", "bits", 3),
        ("GPTQ", "desc_act", "group"),
        ("GPTQ", "dynamic", {"-:.*down.*": {}}),
        ("GPTQ", "checkpoint_format", "marlin"),
        ("FP8 as DeepSeek", "weight_block_size", [64, 64]),
        ("FP8 per tensor", "format", "nvfp4-pack-quantized"),
        ("8 bits per tensor", "config_groups.group_0.weights.num_bits", 4),
        ("8 bits per tensor", "config_groups.group_0.weights.strategy", "group"),
        ("8 bits per tensor", "config_groups.group_0.weights.symmetric", False),
        ("FP8 per tensor", "kv_cache_scheme", {"num_bits": 8}),
        ("FP8 per tensor", "config_groups", {}),
        ("FP8 per tensor", "config_groups.group_0.targets", ["Linear", "Embedding"]),
        ("FP8 per tensor", "config_groups.group_0.weights.strategy", "token"),
        ("FP8 in blocks", "config_groups.group_0.weights.block_structure", [128, 64]),
        ("pack-quantized", "config_groups.group_0.weights.num_bits", 2),
        ("pack-quantized", "config_groups.group_0.weights.actorder", "dynamic"),
        ("pack-quantized", "config_groups.group_0.input_activations", {"num_bits": 8}),
        ("pack-quantized", "transform_config", {"config_groups": {"rotation": {}}}),
    ],
)
def test_other_schemes_are_refused_by_field(layout: str, field: str, value: object) -> None:
    config = LAYOUTS[layout][0]
    read_scheme(config)
    with pytest.raises(ValueError, match=rf"config.quantization_config.{field}: got .*, expected"):
        read_scheme(changed(config, field, value))


@pytest.mark.parametrize(
    ("layout", "part", "change", "message"),
    [
        (
            "AWQ",
            "down_proj.scales",
            lambda tensor: tensor[:1],
            r"down_proj.scales: got shape \(1, 128\), expected \(2, 128\) for .*qweight",
        ),
        ("AWQ", "down_proj.qweight", lambda tensor: tensor.long(), r"down_proj.qweight: got I64 \(256, 16\), expected I32 \(256, 16\)"),
        ("AWQ", "down_proj.qweight", lambda tensor: tensor[0], r"down_proj.qweight: got shape \(16,\), expected two dimensions"),
        ("AWQ", "down_proj.qzeros", lambda tensor: None, r"down_proj.qzeros: got no tensor \(\), expected I32 \(2, 16\)"),
        ("GPTQ", "down_proj.qzeros", lambda tensor: tensor[:1], r"down_proj.qzeros: got I32 \(1, 16\), expected I32 \(4, 16\)"),
        ("GPTQ", "down_proj.qzeros", lambda tensor: tensor.half(), r"down_proj.qzeros: got F16 \(4, 16\), expected I32"),
        ("pack-quantized", "k_proj.weight_shape", lambda tensor: None, r"k_proj.weight_shape: got no tensor \(\), expected I64 \(2,\)"),
        (
            "pack-quantized, 8 bits, zero points",
            "k_proj.weight_zero_point",
            lambda tensor: tensor[:, :1],
            r"k_proj.weight_zero_point: got I32 \(16, 1\), expected I32 \(16, 2\)",
        ),
        ("pack-quantized, zero points", "k_proj.weight_zero_point", lambda tensor: None, r"k_proj.weight_zero_point: got no tensor"),
        ("FP8 per tensor", "o_proj.weight", lambda tensor: tensor[0], "o_proj.weight: got shape"),
        ("AWQ", "down_proj.scales", lambda tensor: None, r"down_proj.scales is missing, expected it with .*down_proj.qweight"),
        ("AWQ", "down_proj.scales", lambda tensor: tensor / 0, r"down_proj.weight holds NaN or infinity"),
        (
            "AWQ",
            "down_proj.scales",
            lambda tensor: tensor.int(),
            r"down_proj.scales: got I32, expected scales of one of F32, BF16, F16, F8_",
        ),
        ("GPTQ", "down_proj.scales", lambda tensor: tensor.double(), r"down_proj.scales: got F64, expected scales of one of F32"),
        ("pack-quantized, 8 bits", "k_proj.weight_scale", lambda tensor: tensor > 0, r"k_proj.weight_scale: got BOOL, expected scales of"),
        ("FP8 in blocks", "down_proj.weight_scale", lambda tensor: tensor.long(), r"down_proj.weight_scale: got I64, expected scales of"),
        ("FP8 per tensor", "o_proj.weight_scale", lambda tensor: tensor.to(torch.uint8), r"o_proj.weight_scale: got U8, expected scales"),
        ("GPTQ", "down_proj.g_idx", lambda tensor: tensor.flip(0), r"down_proj.g_idx: got another order, expected the groups one after"),
        (
            "pack-quantized, 8 bits",
            "k_proj.weight_scale",
            lambda tensor: tensor[:, :2],
            r"k_proj.weight_scale: got shape \(64, 2\), expected \(64, 4\)",
        ),
        ("pack-quantized, 8 bits", "k_proj.weight_scale", lambda tensor: tensor * torch.nan, r"k_proj.weight holds NaN or infinity"),
        ("pack-quantized", "k_proj.weight_shape", lambda tensor: tensor + 1, r"k_proj.weight_shape: got \[65, 129\], expected \[64, 128\]"),
        (
            "FP8 in blocks",
            "down_proj.weight_scale",
            lambda tensor: tensor[:, :1],
            r"down_proj.weight_scale: got shapes \[\(1, 1\)\], expected",
        ),
        ("FP8 in blocks", "down_proj.weight_scale", lambda tensor: None, r"down_proj.weight_scale: got shapes \[\], expected one of"),
        ("FP8 per tensor", "o_proj.weight", lambda tensor: (tensor.float() * torch.nan).to(tensor.dtype), "o_proj.weight holds NaN"),
    ],
)
@needs_c
def test_broken_tensors_are_refused(
    tmp_path: Path, layout: str, part: str, change: Callable[[Tensor], Tensor | None], message: str
) -> None:
    write(tmp_path, layout)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith(part))
    found = change(tensors.pop(name))
    save_file(tensors if found is None else tensors | {name: found.contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained(tmp_path, "none", config=EngineConfig(num_speculative_tokens=0, max_length=64), weights="quantised")
