"""Models from folders: contents are loaded correctly, and errors are raised before memory is allocated."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from stepgraph import Engine, EngineConfig
from stepgraph.runtime.models.files import checkpoint
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.files.config_fields import read_config
from stepgraph.runtime.models.llama import Llama
from stepgraph.sampling.grammar.tokenizers.table import decode_byte_letters, token_decoder
from tests.helpers.families import BASE, CachedModel, count_refused_damaged, folder_of, hf_model, random_model, save

FAMILY = "llama-3.1"
TOKENS = torch.arange(40)[None]
SMALL = EngineConfig(num_speculative_tokens=0, max_rows=2, max_length=64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(folder_of(FAMILY), tmp_path / "model")


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def logits_of(path: Path) -> Tensor:
    return CachedModel(open_checkpoint(path, torch.float32).load("cpu")).run(TOKENS, 0, 40)[0]


def test_shards_hold_the_same_model(tmp_path: Path) -> None:
    sharded = save(hf_model(FAMILY), tmp_path, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(sharded), logits_of(folder_of(FAMILY)))


def test_a_single_file_is_read_although_an_index_lists_others(folder: Path) -> None:
    """Like transformers: the index is of an earlier save."""
    expected = logits_of(folder)
    break_map(folder, {NORM: "gone.safetensors"})
    assert torch.equal(logits_of(folder), expected)


def test_dtype_is_the_folders_or_the_requested_one() -> None:
    half = folder_of(FAMILY, torch.bfloat16)
    assert open_checkpoint(half).load("cpu").embedding.dtype == torch.bfloat16
    wide = open_checkpoint(half, torch.float32).load("cpu")
    assert wide.embedding.dtype == torch.float32 and torch.equal(wide.embedding, open_checkpoint(half).load("cpu").embedding.float())
    for dtype in (torch.int8, torch.float64, "bfloat16"):
        with pytest.raises(
            ValueError, match=f"dtype: got '?{dtype}'?, expected one of torch.float32, torch.bfloat16, torch.float16, or None"
        ):
            open_checkpoint(half, dtype)  # type: ignore[arg-type]


def test_bad_path_and_config_types_are_refused() -> None:
    with pytest.raises(ValueError, match=r"path: got None, expected a path"):
        Engine.from_pretrained(None)  # type: ignore[arg-type]
    for config in ({}, {"max_rows": 2}):
        with pytest.raises(ValueError, match=r"Engine\.config: got {.*}, expected an EngineConfig"):
            Engine.from_pretrained("nowhere", config=config)  # type: ignore[arg-type]


def test_vocabulary_of_a_folder(folder: Path) -> None:
    vocabulary = open_checkpoint(folder).vocabulary
    assert vocabulary.tokens[:5] == (b"<s>", b"<|im_start|>", b"</s>", b"<call>", b"!") and vocabulary.logits_width == 160
    assert vocabulary.stop_token_ids == (2,) and set(vocabulary.control_token_ids) == {0, 1}, "<call> is text: it is not special"
    change_json(folder / "generation_config.json", eos_token_id=[2, 1])
    assert open_checkpoint(folder).vocabulary.stop_token_ids == (2, 1)
    assert decode_byte_letters("\u0120caf\u00c3\u00a9\u010a") == " caf\u00e9\n".encode()
    replace = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    spell = token_decoder({"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]}, None, "sentencepiece")
    assert spell("\u2581caf\u00e9") == " caf\u00e9".encode() and spell("<0x0A>") == b"\n"


def test_without_progress_no_thread_is_started_for_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm.tqdm, "monitor", None)  # as in a new process
    with Engine.from_pretrained(folder, config=SMALL) as engine:
        engine.capture()
    assert tqdm.tqdm.monitor is None


def test_progress_states_the_memory_before_loading(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Engine.from_pretrained(folder, config=SMALL, progress=True).close()
    errors = capsys.readouterr().err
    assert errors.startswith("model: 0.1M weights of float32, 0.00 GiB; cache for 144 tokens, 0.00 GiB\n") and "load: 100%" in errors


def break_index(folder: Path, file: str) -> None:
    names = dict.fromkeys(load_file(folder / "model.safetensors"), file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}), encoding="utf-8")


def break_map(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def replace_by(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


NORM, QUERY = "model.layers.1.input_layernorm.weight", "model.layers.2.self_attn.q_proj.weight"
SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "path: got .*model', expected a local folder"),
    "no config": (lambda f: (f / "config.json").unlink(), "path: got .*model', expected a local folder with a config.json"),
    "a folder with a GGUF file": (lambda f: (f / "config.json").rename(f / "a.gguf"), "config.json, or a .gguf file, such as .*a.gguf"),
    "config is not JSON": (lambda f: cut(f / "config.json", 0.5), "config.json: not JSON"),
    "config nested too deeply": (lambda f: (f / "config.json").write_text("[" * 10**6), "config.json: not JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json: got list, expected a JSON object"),
    "config is a folder": (lambda f: replace_by(f / "config.json", Path.mkdir), "config.json: expected a regular file"),
    "config is a pipe": (lambda f: replace_by(f / "config.json", os.mkfifo), "config.json: expected a regular file"),
    "number with thousands of digits": (
        lambda f: (f / "config.json").write_text('{"hidden_size": ' + "9" * 5000 + "}"),
        "config.json: not JSON: Exceeds|hidden_size: got ",  # a Python without a digit limit refuses the field
    ),
    "weights are a pipe": (lambda f: replace_by(f / "model.safetensors", os.mkfifo), "model.safetensors: expected a regular file"),
    "no weights": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "got neither model.safetensors nor"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: No such file"),
    "another tokenizer": (lambda f: change_json(f / "tokenizer.json", model={"type": "Unigram"}), "expected a model of type BPE"),
    "token beyond the logits": (
        lambda f: change_json(f / "tokenizer.json", model={"type": "BPE", "vocab": {"a": 160}}),
        "token 'a' has the id 160, expected one from 0 to 159",
    ),
    "no stop token": (lambda f: change_json(f / "generation_config.json", eos_token_id=[]), "stop_token_ids: got none"),
    "truncated weights": (lambda f: cut(f / "model.safetensors", 0.9), "model.safetensors: .*incomplete|MetadataIncompleteBuffer"),
    "truncated header": (lambda f: cut(f / "model.safetensors", 0.001), "model.safetensors: "),
    "absurd header": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "model.safetensors: "),
    "index names another folder": (lambda f: break_index(f, "../model/model.safetensors"), "expected the name of a .safetensors file"),
    "index names an absolute path": (lambda f: break_index(f, f"{f}/model.safetensors"), "expected the name of a .safetensors file"),
    "index names a pickle": (lambda f: break_index(f, "pytorch_model.bin"), "expected the name of a .safetensors file"),
    "index maps to a number": (lambda f: break_map(f, {NORM: 3}), "weight_map: got .*, expected an object with a file name for each"),
    "weight_map is a list": (lambda f: break_map(f, ["model.safetensors"]), "weight_map: got"),
    "index names a missing tensor": (lambda f: break_map(f, {"model.extra": "model.safetensors"}), "safetensors: model.extra: "),
    "index names a missing shard": (lambda f: break_index(f, "gone.safetensors"), "gone.safetensors: .*No such file"),
    "missing tensor": (lambda f: change_tensors(f, lambda t: t.pop(NORM)), rf"{NORM} is missing, expected it with shape \(64,\)"),
    "wrong shape": (
        lambda f: change_tensors(f, lambda t: t.update({QUERY: t[QUERY][:-1].clone()})),
        rf"{QUERY}: got shape \(63, 64\), expected \(64, 64\)",
    ),
    "integer weights": (lambda f: change_tensors(f, lambda t: t.update({QUERY: t[QUERY].to(torch.int8)})), f"{QUERY}: got type I8"),
    "unexpected tensor": (lambda f: change_tensors(f, lambda t: t.update({"model.extra": t[NORM] + 1})), "such as model.extra"),
    "NaN": (lambda f: change_tensors(f, lambda t: t[QUERY][3, 5].fill_(torch.nan)), f"{QUERY} holds NaN or infinity"),
    "NaN in bfloat16": (lambda f: change_tensors(f, lambda t: t.update({NORM: t[NORM].bfloat16() * torch.nan})), f"{NORM} holds NaN or"),
    "infinity": (lambda f: change_tensors(f, lambda t: t[NORM][3].fill_(torch.inf)), f"{NORM} holds NaN or infinity"),
}
PHI = {"architectures": ["Phi3ForCausalLM"], "rope_parameters": None}
MOE = {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 16}
SHORT = {"original_max_position_embeddings": 64}
LATENT = {"architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "moe_intermediate_size": 16, "n_group": 4}
LATENT |= {"topk_group": 2, "num_experts_per_tok": 4}
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown architecture": ({"architectures": ["GPT2LMHeadModel"]}, r"architectures: got \['GPT2LMHeadModel'\], expected one of Llama"),
    "no architecture": ({"architectures": None}, "architectures: got None"),
    "zero layers": ({"num_hidden_layers": 0}, "num_hidden_layers: got 0, expected a whole number from 1"),
    "negative size": ({"hidden_size": -64}, "hidden_size: got -64"),
    "true as a number": ({"num_attention_heads": True}, "num_attention_heads: got True"),
    "a fraction": ({"vocab_size": 160.5}, "vocab_size: got 160.5"),
    "hundreds of digits": ({"intermediate_size": 10**300}, "intermediate_size: got 1000.*expected a whole number"),
    "sizes too large": ({"hidden_size": 131072, "intermediate_size": 1 << 20, "num_hidden_layers": 4096, "head_dim": 16}, "e.* parameters"),
    "indivisible heads": ({"num_key_value_heads": 3}, "num_key_value_heads: got 3, expected a divisor of num_attention_heads=4"),
    "odd head size": ({"head_dim": 15}, "head_dim: got 15, expected an even number"),
    "epsilon": ({"rms_norm_eps": -1}, "rms_norm_eps: got -1"),
    "rope_theta is NaN": ({"rope_parameters": {"rope_theta": float("nan"), "rope_type": "default"}}, "rope_theta: got nan"),
    "two scalings": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling: got .* beside rope_parameters, expected one"),
    "rope_theta is 1": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1.0}},
        "rope_theta: got 1.0, expected a number between 1.0 and",
    ),
    "yarn": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": None},
        "original_max_position_embeddings: got None, expected a whole number",
    ),
    "GPT-OSS's limit": ({"architectures": ["GptOssForCausalLM"], "swiglu_limit": 5.0}, "swiglu_limit: got 5.0, expected 7.0"),
    "longrope": ({"rope_scaling": {"type": "longrope"}, "rope_parameters": None}, "rope_type: got 'longrope'"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "rope_type: got 'dynamic'"),
    "odd rotary size": ({**PHI, "partial_rotary_factor": 0.7}, "partial_rotary_factor: got 11 of 16 numbers, expected an even"),
    "longrope factors": ({**PHI, "rope_scaling": {"type": "longrope", "short_factor": [1.0]}, **SHORT}, "short_factor: got .* expected 8"),
    "Gemma's activation": (
        {"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu"},
        "hidden_activation: got 'gelu', expected",
    ),
    "Gemma's soft-cap": (
        {"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0},
        "attn_logit_softcapping: got 50.0, expected False",
    ),
    "too few experts": (
        {**MOE, "num_experts": 2, "num_experts_per_tok": 3},
        "num_experts_per_tok: got 3, expected a whole number from 1 to 2",
    ),
    "mlp_only_layers is a string": (
        {**MOE, "num_experts": 2, "num_experts_per_tok": 1, "mlp_only_layers": "all"},
        "mlp_only_layers: got 'all', expected",
    ),
    "softmax scores": ({**LATENT, "scoring_func": "softmax"}, "scoring_func: got 'softmax', expected 'sigmoid'"),
    "biases of latent attention": ({**LATENT, "attention_bias": True}, "attention_bias: got True, expected False"),
    "key heads of latent attention": ({**LATENT, "num_key_value_heads": 2}, "num_key_value_heads: got 2, expected 4"),
    "odd qk_rope_head_dim": ({**LATENT, "qk_rope_head_dim": 7}, "qk_rope_head_dim: got 7, expected an even number"),
    "larger values than keys": ({**LATENT, "v_head_dim": 17}, "v_head_dim: got 17, expected a whole number from 1 to 16"),
    "groups of one expert": ({**LATENT, "n_group": 8}, "n_group: got 8, expected a divisor of n_routed_experts=8, with two experts"),
    "more experts than in the groups": ({**LATENT, "num_experts_per_tok": 5}, "num_experts_per_tok: got 5, .* from 1 to 4"),
    "a missing tensor of latent attention": (LATENT, "kv_a_proj_with_mqa.weight is missing"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected 'silu'"),
    "biases": ({"mlp_bias": True}, "mlp_bias: got True, expected False"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.bits: got None, expected one of 4, 8"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, expected 1"),
    "layer types": ({"layer_types": ["full_attention", "linear_attention"] * 2}, "layer_types: got .*expected 4 of"),
    "unknown dtype": ({"dtype": "float8"}, "dtype: got 'float8', expected one of 'float32'"),
    "flag is a string": ({"tie_word_embeddings": "no"}, "tie_word_embeddings: got 'no', expected true or false"),
    "tied": ({"tie_word_embeddings": False, "vocab_size": 161}, r"embed_tokens.weight: got shape \(160, 64\), expected \(161, 64\)"),
}


def watch_models(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the devices of the models that are created with memory."""
    made: list[str] = []

    class Watched(Llama):
        def __init__(self, *args: Any, device: str = "cpu", **options: Any) -> None:
            if device != "meta":
                made.append(device)
            super().__init__(*args, device=device, **options)

    monkeypatch.setattr(checkpoint, "Llama", Watched)
    return made


def refuse(path: Path, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """from_pretrained raises the expected error; before it makes a model or a cache, unless the error is in the values of a weight."""
    made = watch_models(monkeypatch)
    with pytest.raises(ValueError, match=message) as caught:
        Engine.from_pretrained(path, config=SMALL, implementation="native")
    assert made == [] or "holds NaN" in message
    assert len(str(caught.value)) < 700, "error messages are short for any content of the file"


@pytest.mark.parametrize("fault", SPOILED)
def test_a_damaged_folder_is_refused(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, message = SPOILED[fault]
    spoil(folder)
    refuse(folder, message, monkeypatch)


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_bad_config_field_is_refused(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, message = CONFIGS[fault]
    change_json(folder / "config.json", **changes)
    refuse(folder, message, monkeypatch)


HOSTILE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    float("nan"),
    float("inf"),
    -1e308,
    10**40,
    "64",
    "",
    "x" * 9999,
    [],
    [1],
    [[]],
    {},
    {"a": 1},
)
FIELDS = "sliding_window layer_types head_dim rope_scaling rope_theta use_sliding_window max_window_layers mlp_bias dtype torch_dtype"


@pytest.mark.parametrize("family", [FAMILY, "deepseek-v3"])
def test_random_config_values_raise_value_errors_only(family: str) -> None:
    """Only ValueErrors, with messages of limited length."""
    fields = json.loads((folder_of(family) / "config.json").read_text(encoding="utf-8"))
    inner = fields["rope_parameters"]
    changes = [{field: value} for field in (*fields, *FIELDS.split(), "quantization_config") for value in HOSTILE]
    changes += [{"rope_parameters": {**inner, field: value}} for field in (*inner, "type", "high_freq_factor") for value in HOSTILE]
    refused: list[str] = []
    for change in changes:
        try:
            read_config(fields | change)
        except ValueError as error:
            refused.append(str(error))
    assert len(changes) / 3 < len(refused) < len(changes)
    assert [error for error in refused if not error.startswith("config.") or len(error) > 500] == []


def stored_config(family: str) -> tuple[dict[str, Any], Any]:
    """The fields of config.json, and the config class of `transformers`."""
    return json.loads((folder_of(family) / "config.json").read_text(encoding="utf-8")), type(hf_model(family).config)


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("deepseek-v3", "routed_scaling_factor"),
        *((family, field) for family in ("deepseek-v3", "glm-4.5") for field in ("first_k_dense_replace", "n_shared_experts")),
        ("mixtral", "rope_parameters"),
        ("mistral", "sliding_window"),
        ("gemma-3", "sliding_window"),
        *(("gpt-oss", field) for field in ("head_dim", "rope_parameters", "sliding_window")),
        *((family, "head_dim") for family in ("qwen3", "gemma-3")),
        *((family, "rms_norm_eps") for family in ("phi-4-mini", "mixtral", "gpt-oss", "glm-4.5")),
    ],
)
def test_an_absent_field_has_the_default_of_transformers(family: str, field: str) -> None:
    fields, kind = stored_config(family)
    del fields[field]
    assert read_config(fields) == read_config(fields | {field: getattr(kind(), field)})


def test_longrope_fields_in_rope_parameters() -> None:
    """The original length there has no effect, as in `transformers`: without one outside, its value is not that of the model."""
    fields, kind = stored_config("phi-4-mini")
    fields["rope_parameters"] |= {"original_max_position_embeddings": 200, "factor": 7.0}
    config = read_config(fields)
    assert config.max_positions == 256
    assert config.rope.magnitude == pytest.approx(Phi3RotaryEmbedding(kind.from_dict(fields)).attention_scaling)
    with pytest.raises(ValueError, match=r"config.original_max_position_embeddings: got None, expected a whole number"):
        read_config(fields | {"original_max_position_embeddings": None})


def test_an_unknown_field_does_not_replace_the_head_size() -> None:
    fields, _ = stored_config("qwen3, yarn")
    assert read_config(fields | {"head_size": 64}) == read_config(fields)


def test_links_to_files_are_followed(folder: Path, tmp_path: Path) -> None:
    """A downloaded folder often contains only links to files."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in folder.iterdir():
        (linked / file.name).symlink_to(file)
    assert torch.equal(logits_of(linked), logits_of(folder))


def test_code_and_pickles_in_a_folder_are_not_opened(folder: Path) -> None:
    change_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Evil"})
    (folder / "modeling.py").write_text("raise SystemExit", encoding="utf-8")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert torch.isfinite(logits_of(folder)).all()


def test_known_unused_tensors_are_accepted(tmp_path: Path) -> None:
    tied = shutil.copytree(folder_of("smollm2"), tmp_path / "tied")
    before, rotary = logits_of(tied), {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    change_tensors(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone(), **rotary}))
    assert torch.equal(logits_of(tied), before)


def test_a_stored_head_that_differs_from_the_embedding_is_not_tied(folder: Path) -> None:
    change_json(folder / "config.json", tie_word_embeddings=True)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits
    torch.testing.assert_close(logits_of(folder), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_random_damage_raises_value_errors_only(folder: Path, name: str) -> None:
    assert count_refused_damaged(folder / name, (folder / name).read_bytes(), 4000, folder) > 20


def test_a_weight_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = random_model("Llama", BASE, seed=3)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = 1e5
    save(model, tmp_path)
    open_checkpoint(tmp_path, torch.float32).load("cpu")
    with pytest.raises(ValueError, match=r"down_proj.weight in float16 holds NaN or infinity"):
        open_checkpoint(tmp_path, torch.float16).load("cpu")
