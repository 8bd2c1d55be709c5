"""Draft folders: contents are loaded correctly, and errors are raised before a model is made, except for those in the values of weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stepgraph import Engine, EngineConfig
from stepgraph.graphs.layers.quantised import unpack
from stepgraph.runtime.cli import main
from stepgraph.runtime.models.draft_llama import map_tokens
from stepgraph.runtime.models.eagle3 import Eagle3
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.files.draft import open_draft
from stepgraph.runtime.models.files.draft_layouts import read_eagle3
from stepgraph.runtime.models.files.weights import read_json
from stepgraph.runtime.models.llama_config import LlamaConfig, RopeConfig
from stepgraph.sampling.grammar import Vocabulary
from tests.helpers.c_library import needs_c
from tests.helpers.draft_engines import D2T, DRAFTERS, EAGLE_LAYERS, DraftCase, change_json
from tests.helpers.families import folder_of
from tests.runtime.models.files.test_checkpoint import watch_models
from tools.quantise_head import main as quantise_main
from tools.random_weights import randomised
from tools.train.saving import save_eagle3

EAGLE3, MTP, MANY, MODEL = DRAFTERS
IDS = "eagle_aux_hidden_state_layer_ids"


def quantise(*arguments: str) -> int:
    return quantise_main(list(arguments))


def changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def config(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / "config.json", **fields)


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    return lambda folder: changed(folder, change)


def renamed(names: Callable[[str], str]) -> Callable[[Path], None]:
    def rename(held: dict[str, Tensor]) -> None:
        moved = {names(name): tensor for name, tensor in held.items()}
        held.clear()
        held.update(moved)

    return tensors(rename)


@pytest.mark.parametrize("called", ["model.layers.0.", "layers.0.", "midlayer."])
def test_heads_load_under_all_public_tensor_names(tmp_path: Path, called: str) -> None:
    """EAGLE's names, and those of speculators with and without the prefix `model`."""
    folder = shutil.copytree(EAGLE3.folder, tmp_path / "head")
    prefix = "model." if called.startswith("model.") else ""

    def public(name: str) -> str:
        plain = name in ("d2t", "t2d", "lm_head.weight")
        return name if plain else prefix + name.replace("midlayer.", called.removeprefix("model."))

    renamed(public)(folder)
    loaded = [load(EAGLE3, each) for each in (EAGLE3.folder, folder)]
    assert all(torch.equal(one, two) for one, two in zip(loaded[0].state_dict().values(), loaded[1].state_dict().values(), strict=True))
    assert loaded[0].d2t is not None and torch.equal(loaded[0].d2t, D2T)


def load(drafter: DraftCase, folder: Path) -> Eagle3:
    checkpoint = open_checkpoint(drafter.target)
    opened = open_draft(folder, checkpoint)
    head = opened.load(checkpoint.load("cpu", opened.feature_layers), "cpu")
    assert isinstance(head, Eagle3)
    return head


def test_a_head_without_embedding_and_lm_head_uses_the_targets(tmp_path: Path) -> None:
    """The head has the target's vocabulary, and no d2t."""
    checkpoint = open_checkpoint(EAGLE3.target)
    target = checkpoint.load("cpu")
    config_fields = read_json(EAGLE3.folder / "config.json") | {"draft_vocab_size": None, "hidden_size": 48, "num_attention_heads": 6}
    fitting = randomised(Eagle3(read_eagle3(config_fields, target.config), embedding=target.embedding, head=target.unembedding), 5)
    folder = save_eagle3(tmp_path / "bare", fitting, own_head=False)
    assert not {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"} & set(load_file(folder / "model.safetensors"))
    opened = open_draft(folder, checkpoint)
    loaded = opened.load(target, "cpu")
    assert isinstance(loaded, Eagle3) and loaded.embedding is target.embedding and loaded.head is target.embedding and loaded.d2t is None
    assert torch.equal(loaded.layer.qkv, fitting.layer.qkv) and loaded.vocab_size == target.vocab_size


PACKED = {f"midlayer.self_attn.{part}_proj.weight" for part in "qkvo"} | {f"midlayer.mlp.{part}_proj.weight" for part in ("gate", "up")}


@needs_c
def test_a_head_in_eight_bits_has_the_values_of_its_formula(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only rows of whole groups are quantised: fc has rows of 144 numbers, down_proj of 40. The model joins q, k and v to one matrix."""
    assert quantise(str(EAGLE3.folder), str(tmp_path / "head")) == 0
    assert f"{(tmp_path / 'head' / 'model.safetensors').stat().st_size:,} bytes" in capsys.readouterr().out
    before, stored = (load_file(folder / "model.safetensors") for folder in (EAGLE3.folder, tmp_path / "head"))
    plain, kept = load(EAGLE3, EAGLE3.folder), load(EAGLE3, tmp_path / "head")
    dense = dict(before)
    for name in PACKED | {"lm_head.weight"}:
        module = name.removesuffix("weight")
        scales = stored.pop(f"{module}weight_scale").double().repeat_interleave(32, 1)
        numbers = stored.pop(f"{module}weight_packed").view(torch.uint8).double() - 128  # four per word, the lowest bits first
        assert stored.pop(f"{module}weight_shape").tolist() == list(before[name].shape) and int(numbers.abs().max()) == 127
        dense[name] = (numbers * scales).float()
        assert ((dense[name] - before[name]).abs() <= scales * 0.51 + 2**-24).all(), name  # half a step, and the rounding of the scale
    assert all(torch.equal(stored[name], before[name]) for name in stored)
    joined = {
        "layer.qkv": torch.cat([dense[f"midlayer.self_attn.{part}_proj.weight"] for part in "qkv"]),
        "layer.output": dense["midlayer.self_attn.o_proj.weight"],
    }
    for name, expected in joined.items():
        assert torch.equal(unpack(kept.get_parameter(name)), expected), name
    own = {name for name, parameter in kept.named_parameters() if parameter.dtype is torch.uint8}
    assert own == set(joined)  # the others are dequantised: gate and up have 40 rows, lm_head has 54, not whole tiles
    assert torch.equal(kept.head, dense["lm_head.weight"])
    assert torch.equal(kept.layer.gate_up, torch.cat([dense[f"midlayer.mlp.{part}_proj.weight"] for part in ("gate", "up")]))
    assert torch.equal(kept.fuse, plain.fuse)


@needs_c
def test_a_head_in_eight_bits_changes_no_text_and_no_row_of_a_batch(tmp_path: Path) -> None:
    """The head is quantised, the target is not."""
    quantise(str(EAGLE3.folder), str(tmp_path / "head"))
    prompts, made = [[1, 2, 3, 4], [9, 8, 7], [20, 21, 22, 23, 24]], []
    for draft, rows in (("none", 3), (tmp_path / "head", 3), (tmp_path / "head", 1)):
        drafts = 0 if draft == "none" else 3
        config = EngineConfig(max_rows=rows, num_speculative_tokens=drafts, draft_length=drafts, max_length=64)
        with Engine.from_pretrained(EAGLE3.target, draft, config=config) as engine:
            jobs = [engine.submit(prompt, max_new_tokens=30) for prompt in prompts]
            list(engine.stream())
            made.append([(job.tokens, job.rounds) for job in jobs])
    plain, batch, alone = made
    assert [tokens for tokens, _ in batch] == [tokens for tokens, _ in plain]
    assert alone == batch  # equal drafts give equal numbers of rounds


@needs_c
def test_inspect_reports_the_kept_bytes_of_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantise(str(EAGLE3.folder), str(tmp_path / "head"))
    capsys.readouterr()
    kept = load(EAGLE3, tmp_path / "head")
    nbytes = sum(parameter.nbytes for parameter in kept.parameters() if parameter.dtype is torch.uint8)
    assert main(["inspect", str(EAGLE3.target), "--draft", str(tmp_path / "head")]) == 0
    found = " ".join(capsys.readouterr().out.split())
    assert "(EAGLE-3 head, up to 8 drafts; " in found and f"{nbytes / 2**20:,.1f} MiB in 8 bits in groups of 32" in found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (config(quantization_config={"quant_method": "bitsandbytes"}), "head: config.quantization_config.quant_method: got 'bitsandbytes'"),
        (config(quantization_config={}), r"head: lm_head.weight is missing, expected it with shape \(54, 32\)"),
        (
            tensors(lambda held: held.update({"lm_head.weight_scale": held["lm_head.weight_scale"][:, :0]})),
            r"head: lm_head.weight_scale: got shape \(\d+, 0\), expected \(\d+, 1\) for lm_head.weight_packed and groups of 32",
        ),
        (
            tensors(lambda held: held["midlayer.self_attn.o_proj.weight_scale"].fill_(torch.inf)),
            "head: midlayer.self_attn.o_proj.weight holds NaN or infinity",
        ),
    ],
)
def test_broken_heads_in_eight_bits_are_refused(tmp_path: Path, change: Callable[[Path], object], message: str) -> None:
    quantise(str(EAGLE3.folder), str(tmp_path / "head"))
    change(tmp_path / "head")
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained(EAGLE3.target, tmp_path / "head")


def test_quantise_head_gives_the_reason_of_a_refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "head"
    assert quantise(str(tmp_path), str(out)) == 2 and not out.exists()
    assert quantise(str(EAGLE3.folder), str(EAGLE3.folder)) == 2
    quantise(str(EAGLE3.folder), str(out))
    assert quantise(str(out), str(tmp_path / "again")) == 2
    errors = capsys.readouterr().err
    for part in (f"{tmp_path / 'config.json'}: ", "the folder of the head, expected another one", "expected a head that is not quantised"):
        assert part in errors


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, (2, 4 // 2, 4 - 3)),
        ({IDS: [1, 0, 3]}, (1, 0, 3)),
        ({"eagle_config": {IDS: [1, 0, 3]}}, (2, 1, 4)),
        ({IDS: [4], "eagle_config": {IDS: [0]}}, (4,)),
    ],
)
def test_feature_layers_by_config_layout(fields: dict[str, Any], layers: tuple[int, ...]) -> None:
    """Ids at the top of a config name layer inputs, ids in eagle_config layer outputs."""
    config_fields = read_json(EAGLE3.folder / "config.json") | {IDS: None} | fields
    assert read_eagle3(config_fields, open_checkpoint(EAGLE3.target).config).feature_layers == layers


def test_a_config_of_speculators() -> None:
    config_fields = read_json(EAGLE3.folder / "config.json")
    own = ("draft_vocab_size", "norm_before_residual", IDS)
    inner = {name: value for name, value in config_fields.items() if name not in own}
    outer = {name: config_fields[name] for name in own} | {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
    target = open_checkpoint(EAGLE3.target).config
    assert read_eagle3(outer | {"transformer_layer_config": inner}, target) == read_eagle3(config_fields, target)
    assert read_eagle3(config_fields, target).feature_layers == EAGLE_LAYERS


def test_configs_as_they_are_published() -> None:
    """Sizes of heads for Llama 3.3 70B and Qwen3 32B; for the latter head_dim * heads is not hidden_size."""
    common = {"hidden_act": "silu", "num_hidden_layers": 1, "use_cache": True, "tie_word_embeddings": False, "draft_vocab_size": 32000}
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    llama = common | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    llama |= {
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "rope_scaling": scaling,
        "torch_dtype": "float16",
        "architectures": ["LlamaForCausalLM"],
    }
    target = LlamaConfig(128256, 8192, 28672, 64, 8, 128, (None,) * 80, dtype=torch.bfloat16)
    head = read_eagle3(llama, target)
    assert head.feature_layers == (2, 40, 77) and head.layer.rope == RopeConfig(5e5, 8.0, 1.0, 4.0, 8192)
    assert (head.draft_vocab_size, head.layer.head_size, head.layer.dtype) == (32000, 128, torch.bfloat16)
    qwen = common | {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 80}
    qwen |= {"vocab_size": 151936, "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 64}
    qwen |= {"architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "rope_scaling": None, "rms_norm_eps": 1e-6}
    head = read_eagle3(qwen, LlamaConfig(151936, 5120, 25600, 64, 8, 128, (None,) * 64))
    assert head.feature_layers == (2, 32, 61) and (head.layer.head_size, head.layer.qkv_size, head.layer.norm_epsilon) == (80, 6400, 1e-6)


def test_map_tokens_maps_tokens_with_equal_bytes() -> None:
    target = Vocabulary([b"a", b"b", b"<s>", b"</s>", b""], [3], 8, [2])
    same = map_tokens(Vocabulary(target.tokens, [3], 8, [2]), target)
    assert same is None
    wider = map_tokens(Vocabulary([*target.tokens, b"ab"], [3], 16, [2]), target)
    assert wider is not None and [each.tolist() for each in wider] == [[0, 1, 2, 3, 4, 0, 0, 0], [0, 1, 2, 3], [0, 1, 2, 3]]
    moved = map_tokens(Vocabulary([b"</s>", b"x", b"b", b"<s>", b"a", b"b"], [0], 6, [3]), target)
    assert moved is not None and [each.tolist() for each in moved] == [[4, 2, 3, 0, 0, 0, 0, 0], [0, 2, 3, 4], [3, 1, 2, 0]]
    with pytest.raises(ValueError, match=r"lacks 2 of the target's 5 tokens, such as 1 b'b'"):
        map_tokens(Vocabulary([b"a", b"<s>", b"</s>"], [2]), target)  # <s> is text here


QUERY, JOIN = "midlayer.self_attn.q_proj.weight", "model.layers.4.eh_proj.weight"
SPOILED: dict[str, tuple[DraftCase, Callable[[Path], object], str]] = {
    "another vocabulary": (EAGLE3, config(vocab_size=200), "head: config.vocab_size: got 200, expected the target's 160"),
    "draft_vocab_size too large": (EAGLE3, config(draft_vocab_size=161), "draft_vocab_size: got 161, expected a whole number from 1 to"),
    "another target": (EAGLE3, config(target_hidden_size=64), "target_hidden_size: got 64, expected the target's hidden_size 48"),
    "two layers": (EAGLE3, config(num_hidden_layers=2), "num_hidden_layers: got 2, expected 1"),
    "a layer beyond the target": (
        EAGLE3,
        config(**{IDS: [1, 5]}),
        rf"{IDS}: got \[1, 5\], expected a list of layers of the target, which has 4",
    ),
    "flag is a string": (EAGLE3, config(norm_before_residual="yes"), "norm_before_residual: got 'yes', expected true or false"),
    "a norm after the layer": (EAGLE3, config(norm_output=True), "norm_output: got True, expected False"),
    "another norm": (EAGLE3, config(eagle_config={"use_mtp_layernorm": True}), "use_mtp_layernorm: got True, expected False"),
    "norm before fc": (EAGLE3, config(norm_before_fc=True), "norm_before_fc: got True, expected False"),
    "no hidden states of the target": (
        EAGLE3,
        config(eagle_config={"use_aux_hidden_state": False}),
        "hidden_state: got False, expected True",
    ),
    "eagle_config is a list": (EAGLE3, config(eagle_config=[1]), r"eagle_config: got \[1\], expected an object"),
    "two feature layers": (EAGLE3, config(**{IDS: [1, 2]}), r"fc.weight: got shape \(32, 144\), expected \(32, 96\)"),
    "q_proj of a plain Llama layer": (
        EAGLE3,
        tensors(lambda held: held.update({QUERY: held[QUERY][:, :32].clone()})),
        rf"{QUERY}: got shape \(32, 32\), expected \(32, 64\)",
    ),
    "no fc": (EAGLE3, tensors(lambda held: held.pop("fc.weight")), r"fc.weight is missing, expected it with shape \(32, 144\)"),
    "unexpected tensor": (EAGLE3, tensors(lambda held: held.update({"fc.bias": torch.ones(32)})), "account for, such as fc.bias"),
    "no embedding": (
        EAGLE3,
        tensors(lambda held: held.pop("embed_tokens.weight")),
        r"embed_tokens.weight is missing, expected it with shape \(160, 32\): the target's has a width of 48",
    ),
    "duplicate tensor": (
        EAGLE3,
        tensors(lambda held: held.update({"model.norm.weight": held["norm.weight"].clone()})),
        "norm.weight: got it twice, as .*norm.weight and",
    ),
    "NaN": (EAGLE3, tensors(lambda held: held[QUERY][3, 5].fill_(torch.nan)), f"{QUERY} holds NaN or infinity"),
    "no d2t": (EAGLE3, tensors(lambda held: held.pop("d2t")), r"d2t is missing, expected it with shape \(54,\): the head proposes"),
    "d2t is floating point": (EAGLE3, tensors(lambda held: held.update(d2t=held["d2t"].float())), "d2t: got F32 of shape .*expected I64"),
    "d2t beyond the vocabulary": (EAGLE3, tensors(lambda held: held["d2t"][-1].fill_(200)), "d2t: got duplicate target ids"),
    "d2t has ids instead of offsets": (EAGLE3, tensors(lambda held: held.update(d2t=D2T * 2)), "d2t: got duplicate target ids"),
    "t2d differs from d2t": (EAGLE3, tensors(lambda held: held["t2d"].logical_not_()), "t2d: got marks that differ"),
    "experts": (
        MANY,
        renamed(lambda name: name.replace("layers.5.mlp.", "layers.5.mlp.experts.3.")),
        r"layers.5.mlp.gate_proj.weight is missing, expected it with shape",
    ),
    "missing module": (MANY, config(num_nextn_predict_layers=4), "num_nextn_predict_layers: got 4, expected 3, the number of eh_proj"),
    "a gap": (
        MANY,
        renamed(lambda name: name.replace("layers.5.", "layers.9.")),
        r"eh_proj.weight: got it in layers \[4, 6, 9\], expected consecutive layers",
    ),
    "no norm": (
        MANY,
        tensors(lambda held: held.pop("model.layers.5.shared_head.norm.weight")),
        r"model.layers.5.shared_head.norm.weight is missing, expected it with shape \(64,\)",
    ),
    "an empty config": (MANY, lambda folder: (folder / "config.json").write_text("{}"), "config.architectures: got None, expected one of"),
    "another size": (MANY, config(hidden_size=128), "hidden_size: got 128, expected the target's 64"),
    "another lm_head": (
        MANY,
        tensors(lambda held: held.update({"model.layers.4.shared_head.head.weight": torch.zeros(160, 64)})),
        "model.layers.4.shared_head.head.weight differs from the target's lm_head.weight, which MTP modules share",
    ),
    "embedding of another shape": (
        MANY,
        tensors(lambda held: held.update({"model.layers.6.embed_tokens.weight": torch.zeros(160, 32)})),
        "embed_tokens.weight differs from the target's model.embed_tokens.weight, which MTP modules share",
    ),
    "another tokenizer": (
        MODEL,
        lambda folder: change_json(folder / "tokenizer.json", model={"type": "BPE", "vocab": {"a": 4}}),
        "head: vocabulary: lacks .* of the target's 110 tokens, such as 4 b'!'",
    ),
    "no hidden_size": (MODEL, config(hidden_size=None), "head: config.hidden_size: got None, expected a whole number from 1 to 131072"),
    "unsupported architecture": (
        MODEL,
        config(architectures=["T5"]),
        r"architectures: got \['T5'\], expected one causal language model of .*, an EAGLE-3 head .*, or MTP modules",
    ),
    "no folder": (
        MODEL,
        shutil.rmtree,
        "draft: got .*head', expected a local folder with a config.json, a .gguf file, or one of 'mtp', 'ngram'",
    ),
    "no config": (
        EAGLE3,
        lambda folder: (folder / "config.json").unlink(),
        "draft: got .*head', expected a local folder with a config.json, a .gguf file, or one of 'mtp', 'ngram'",
    ),
}


@pytest.mark.parametrize("fault", SPOILED)
def test_a_damaged_draft_is_refused(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, spoil, message = SPOILED[fault]
    folder = shutil.copytree(drafter.folder, tmp_path / "head")
    spoil(folder)
    made = watch_models(monkeypatch)
    with pytest.raises(ValueError, match=message) as caught:
        Engine.from_pretrained(drafter.target, folder)
    of_values = "holds NaN" in message or "differs from the target's" in message  # known when the weights are loaded
    assert of_values or made == []
    assert len(str(caught.value)) < 700


def test_unsupported_draft_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"draft: got 'mtp', expected a target with MTP modules; .* has no num_nextn_predict_layers"):
        Engine.from_pretrained(folder_of("qwen3"), "mtp")
    with pytest.raises(ValueError, match=r"feature_layers: got \(1,\), expected none, as the draft determines them: \(3, 0, 2\)"):
        Engine.from_pretrained(EAGLE3.target, EAGLE3.folder, feature_layers=[1])
    small = EngineConfig(max_rows=1, num_speculative_tokens=0, max_length=16)
    Engine.from_pretrained(EAGLE3.target, EAGLE3.folder, config=small, progress=True).close()
    stated = capsys.readouterr().err.splitlines()
    assert "eagle3: EAGLE-3 head: 0.0M weights of float32" in stated[1]


def test_default_drafts_equal_the_number_of_mtp_modules() -> None:
    with Engine.from_pretrained(MANY.target, MANY.folder) as engine:
        assert engine.limits.num_speculative_tokens == 3


def test_default_max_length_fits_target_and_draft(tmp_path: Path) -> None:
    """Without a config the engine uses the smaller limit; a larger max_length names the model that lacks the positions."""
    folder = Path(shutil.copytree(MODEL.folder, tmp_path / "short"))
    config(max_position_embeddings=24)(folder)
    with Engine.from_pretrained(MODEL.target, folder) as engine:
        assert engine.limits.max_length == 24
    for none in (None, "none"):
        with Engine.from_pretrained(MODEL.target, none) as engine:
            assert engine.limits.max_length == 512
    with pytest.raises(ValueError, match=r"EngineConfig\.max_length: got 25, expected at most the 24 positions of the draft"):
        Engine.from_pretrained(MODEL.target, folder, config=EngineConfig(max_length=25))


def test_a_target_with_mtp_modules_decodes_without_them() -> None:
    with Engine.from_pretrained(MTP.target, config=EngineConfig(num_speculative_tokens=0, max_rows=1, max_length=16)) as engine:
        assert len(engine.generate([5, 6], max_new_tokens=4).tokens) == 4
