"""Tiny random models of many families in the engine, by the modules of `transformers`, against its eager greedy decoding.

FAMILIES is the table of docs/models.md, which test_the_documented_families_are_those_tested compares.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from stepgraph import Constraint, Engine, SamplingParams, Vocabulary
from stepgraph.runtime.models.files.config_fields import ARCHITECTURES
from stepgraph.runtime.models.files.transformers_folder import open_target, open_transformers
from stepgraph.runtime.models.transformers_layers import Attention, GatedMlp, Layer
from stepgraph.runtime.models.transformers_model import TransformersModel
from stepgraph.sampling.grammar import GrammarCompiler, MaskStatus
from tests.helpers.families import CONFIG, GRAMMAR, PROMPTS, CachedModel, random_model, save

BASE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SLIDING = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}
GROUPED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 2, "topk_group": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 12},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma": {},
    "Gemma2": {**SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "Gemma3": {**SLIDING, "query_pre_attn_scalar": 16},
    "Phi3": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": EXPERTS,
    "GptOss": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmo": {"clip_qkv": 8.0},
    "Olmo2": {},
    "Olmo3": SLIDING,
    "Olmoe": EXPERTS,
    "Granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0, "attention_multiplier": 0.2},
    "Afmoe": {**EXPERTS, "sliding_window": 12, "global_attn_every_n_layers": 2, "num_dense_layers": 1},
    "GraniteMoeShared": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 96, "residual_multiplier": 0.5},
    "Cohere2": {**SLIDING, "logit_scale": 0.25},
    "SmolLM3": {"no_rope_layers": [1, 0, 1]},
    "Glm4": {"partial_rotary_factor": 0.5},
    "DeepseekV3": {**GROUPED, **LATENT, "first_k_dense_replace": 1, "head_dim": 8},
    "Glm4Moe": {**GROUPED, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5},
}
COUNT = 16
ONE_SIZE = replace(CONFIG, buckets=(3,))
VARIES = ("Mixtral", "Qwen3Moe", "GptOss", "Olmoe", "Afmoe", "GraniteMoeShared", "DeepseekV3", "Glm4Moe")


@functools.cache
def family_model(family: str) -> Any:
    """A model with random weights whose products keep the magnitude of their input."""
    kind = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(len(family))
    transformers.utils.logging.set_verbosity_error()
    config = kind.config_class(**{**BASE, **FAMILIES[family]}, attn_implementation="eager")  # others ignore soft-caps in some versions
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(float("norm" in name and "Gemma" not in family), 0.3)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@functools.cache
def loaded(family: str, parent: Path) -> TransformersModel:
    folder = parent / family
    return open_transformers(folder if folder.exists() else save(family_model(family), folder)).load("cpu")


def chosen(family: str, vocabulary: Vocabulary, prompt: list[int], tokens: list[int], constraint: Constraint | None = None) -> list[int]:
    """What greedy decoding chooses after the prompt and each prefix of `tokens`, from one pass over the whole text."""
    with torch.no_grad():
        logits = family_model(family)(torch.tensor([prompt + tokens]), use_cache=False).logits[
            0, len(prompt) - 1 : -1, : len(vocabulary.tokens)
        ]
    if constraint is not None:
        matcher, masks = GrammarCompiler(vocabulary).compile(constraint).matcher(), torch.zeros(1, vocabulary.mask_words, dtype=torch.int32)
        for position, token in enumerate(tokens):
            assert matcher.fill_next_token_bitmask(masks, 0) == MaskStatus.OK
            words = masks[0].tolist()
            legal = [words[index // 32] >> (index % 32) & 1 == 1 for index in range(logits.shape[1])]
            logits[position, ~torch.tensor(legal)] = -torch.inf
            assert matcher.accept_token(token)
    return [int(choice) for choice in logits.argmax(-1)]


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_equal_eager_transformers(family: str, parent: Path) -> None:
    """Prompts in chunks, a batch of three, look-up drafts, with and without a grammar."""
    folder = save(family_model(family), parent / family)
    with Engine.from_pretrained(folder, "ngram", config=ONE_SIZE, implementation="transformers") as engine:
        vocabulary = open_target(folder).vocabulary
        accepted = 0
        for constraint in (None, GRAMMAR):
            jobs = engine.generate(PROMPTS, max_new_tokens=COUNT, constraint=constraint)
            for prompt, job in zip(PROMPTS, jobs, strict=True):
                assert job.tokens == chosen(family, vocabulary, prompt, job.tokens, constraint)
                accepted += job.num_accepted_drafts
        assert accepted > 5


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_are_independent_of_chunking_and_batch(family: str, parent: Path) -> None:
    """Not for models with experts, whose products are not those of nn.Linear."""
    model = loaded(family, parent)
    assert model.batch_invariant == (family not in VARIES)
    if not model.batch_invariant:
        return
    tokens, cached = torch.randint(0, BASE["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(0)), CachedModel(model, 64)
    whole, _ = cached.run(tokens, 0, 40)
    for rows, size in ((2, 17), (2, 1), (1, 16)):
        cached.buffers.reset()
        assert torch.equal(cached.in_chunks(tokens[:rows], size), whole[:rows])


@pytest.mark.parametrize(
    ("family", "layers", "attentions", "mlps"),
    [
        ("Qwen3", 3, 3, 3),
        ("SmolLM3", 3, 2, 3),  # a layer without RoPE
        ("Granite", 0, 3, 3),  # scales its residuals
        ("Mixtral", 3, 3, 0),
        ("Gemma", 0, 3, 0),  # GELU; norms of its own
        ("Olmo", 0, 0, 3),  # clips queries, keys and values, which has no effect on small values; norms without weights
    ],
)
def test_equivalent_modules_are_replaced(family: str, layers: int, attentions: int, mlps: int, parent: Path) -> None:
    model = loaded(family, parent)
    found = [type(module) for module in model.modules()]
    assert [found.count(kind) for kind in (Layer, Attention, GatedMlp)] == [layers, attentions, mlps]


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_have_the_names_of_all_linear_modules(family: str, parent: Path) -> None:
    model = loaded(family, parent)
    named = {name: child.out_features for name, child in family_model(family).named_modules() if isinstance(child, torch.nn.Linear)}
    adapted = {name: size for weight in model.lora_weights.values() for name, size in weight.parts.items()}
    assert adapted == {name: size for name, size in named.items() if name != "lm_head"}


@pytest.mark.parametrize("family", ["Gemma2", "Olmoe"])
def test_a_family_drafts_for_another(family: str, parent: Path) -> None:
    """Most drafts of a model with the same weights are accepted, few of another model."""
    folders = [save(family_model(each), parent / f"{each} of {family}") for each in (family, "Granite")]
    for folder, right in zip(folders, (True, False), strict=True):
        with Engine.from_pretrained(folders[0], folder, config=ONE_SIZE) as engine:
            assert sum(" of transformers" in note for note in engine.notes) == 2
            jobs = engine.generate(PROMPTS, max_new_tokens=COUNT, constraint=GRAMMAR)
            vocabulary = open_target(folder).vocabulary
            for prompt, job in zip(PROMPTS, jobs, strict=True):
                assert job.tokens == chosen(family, vocabulary, prompt, job.tokens, GRAMMAR)
            assert (sum(job.num_accepted_drafts for job in jobs) >= sum(len(job.tokens) for job in jobs) // 2) == right


@pytest.mark.parametrize(
    "kind", ["GPT2LMHeadModel", *(f"{family}ForCausalLM" for family in ("GPTNeoX", "GPTJ", "Gemma4Unified", "LaraMini"))]
)
def test_classes_that_call_their_decoder_in_another_way(kind: str, tmp_path: Path) -> None:
    """With positional arguments, without angles in some layers, or for `cross_attentions` or `shared_kv_states`."""
    causal, sizes = getattr(transformers, kind), {"n_embd": 64, "n_head": 4, "n_layer": 3, "rotary_dim": 8}
    torch.manual_seed(1)
    model = causal(causal.config_class(**BASE | SLIDING | {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]}, **sizes)).eval()
    tokens, cached = torch.arange(40)[None] * 3, CachedModel(open_target(save(model, tmp_path)).load("cpu"), 64)
    with torch.no_grad():
        torch.testing.assert_close(cached.in_chunks(tokens, 17), model(tokens, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_a_captured_round_does_not_look_for_the_padding_token(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**BASE | {"pad_token_id": 0}, n_embd=64, n_head=4, n_layer=2)).eval()
    with Engine.from_pretrained(save(model, tmp_path), "none", config=CONFIG) as engine:
        tokens = engine.generate([5, 6, 7], max_new_tokens=8, sampling=SamplingParams(ignore_eos=True)).tokens
    with torch.no_grad():
        assert tokens == model(torch.tensor([[5, 6, 7, *tokens]]), use_cache=False).logits[0, 2:-1].argmax(-1).tolist()


def unsupported(family: str, message: str, parent: Path, **fields: Any) -> None:
    stated = {name: value for name, value in {**BASE, **fields}.items() if value is not None}
    folder = save(random_model(family, stated, 0), parent / family)
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained(folder, config=CONFIG)


def test_layers_without_paged_attention_are_refused(parent: Path) -> None:
    """The error names the layer, its kind and the reason, before weights are loaded."""
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    unsupported(
        "Qwen3Next", r"layer_types: layer 0: got 'linear_attention', expected one of .*: the state of other", parent, **EXPERTS, **linear
    )
    unsupported("Mamba", "layer 0: got .linear_attention.", parent)
    unsupported("Falcon", "FalconForCausalLM: it does not use the attention interface of transformers$", parent, alibi=False, head_dim=None)
    unsupported("OPT", "OPTForCausalLM: its decoder is not one of its own modules", parent)


def test_the_documented_families_are_those_tested() -> None:
    """Also compares whether bits depend on the batch, and which families have a native class."""
    page = (Path(__file__).parents[3] / "docs/models.md").read_text(encoding="utf-8").partition("### Supported combinations")[0]
    rows = re.findall(r"^\| `(\w+)ForCausalLM` \| (native as well)?.*\| (yes|no) \|$", page, re.MULTILINE)
    native = [f"{family}ForCausalLM" in ARCHITECTURES for family in FAMILIES]
    varies = ["no" if family in VARIES else "yes" for family in FAMILIES]
    assert [(family, bool(words), word) for family, words, word in rows] == list(zip(FAMILIES, native, varies, strict=True))
