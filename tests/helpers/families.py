"""Tiny random models of each family, made and saved by `transformers`, the reference for their logits."""

from __future__ import annotations

import atexit
import functools
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from stepgraph import Constraint, EngineConfig
from stepgraph.graphs import Limits, StaticBuffers
from stepgraph.graphs.limits import KvCacheDtype
from stepgraph.graphs.model_call import ModelInput
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.transformers_model import TransformersModel

PAGE, LENGTH, VOCABULARY = 16, 208, 160
FEATURE_LAYERS = (1, 0, 3)

# For engines that are compared with another implementation: three rows, prompts of different lengths in chunks, drafts
CONFIG = EngineConfig(
    max_rows=3,
    num_speculative_tokens=2,
    draft_length=2,
    max_length=64,
    page_size=4,
    prefill_chunk=7,
    buckets=(1, 3),
    greedy_only=True,
    compile_isolation="none",
)
PROMPTS = [[7, 30, 5], [40 + index % 5 for index in range(17)], [12, 12, 3, 90, 33, 12, 12]]
GRAMMAR = Constraint.regex("[a-f]{3,9}[0-9]+[A-Z]?")

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], "long_factor": [4.0] * 6}
_PHI_4 = {"rope_scaling": _LONG, "original_max_position_embeddings": 256}
_SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
_YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False}}
_YARN_SCALED = {"rope_scaling": {**_YARN["rope_scaling"], "truncate": True, "mscale": 1.0, "mscale_all_dim": 0.5}}
_LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "num_key_value_heads": 4}
_GROUPED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "first_k_dense_replace": 1}
_GROUPED |= {"num_nextn_predict_layers": 0}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("Llama", {"num_key_value_heads": 4}),
    "llama-3.1": ("Llama", {"rope_theta": 500_000.0, "rope_scaling": _LLAMA3}),
    "llama, linear scaling": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama, biases, head size of its own": ("Llama", {"attention_bias": True, "head_dim": 24}),
    "smollm2": ("Llama", {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 16}),
    "mistral without a window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2.5, two layers slide": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 16}),
    "qwen3-moe": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1], "head_dim": 24, "attention_bias": True}),
    "qwen3-moe, shares as they are": ("Qwen3Moe", {**_EXPERTS, "decoder_sparse_step": 2}),
    "qwen3-moe, all layers slide": ("Qwen3Moe", {**_EXPERTS, "use_sliding_window": True, "sliding_window": 16}),
    "gpt-oss": ("GptOss", {**_SLIDING, **_YARN, "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 24, "pad_token_id": 0}),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **_GROUPED,
            **_LATENT,
            **_YARN_SCALED,
            "q_lora_rank": 40,
            "v_head_dim": 12,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.0,
        },
    ),
    "deepseek-v3, queries of the hidden state": (
        "DeepseekV3",
        {**_GROUPED, **_LATENT, "q_lora_rank": None, "v_head_dim": 24, "n_group": 1, "topk_group": 1, "n_shared_experts": 2}
        | {"norm_topk_prob": False, "routed_scaling_factor": 0.5, "rope_interleave": False},
    ),
    "glm-4.5": ("Glm4Moe", {**_GROUPED, "head_dim": 24, "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": True}),
    "qwen3, yarn": ("Qwen3", {**_YARN, "head_dim": 32}),
    "phi-3, with a window": ("Phi3", {"sliding_window": 16, "pad_token_id": 0}),
    "phi-4-mini": ("Phi3", {**_PHI_4, "partial_rotary_factor": 0.75, "pad_token_id": 0, "tie_word_embeddings": True}),
    "gemma-3": (
        "Gemma3",
        {**_SLIDING, "head_dim": 24, "query_pre_attn_scalar": 20, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
}


@functools.cache
def hf_model(family: str, dtype: torch.dtype = torch.float32, lean: bool = False) -> Any:
    """A model of `transformers` with random weights. With `lean` its logits lean towards one token, as a trained model's do: in
    bfloat16 a tenth of a random model's choices would be near ties.
    """
    kind, changes = FAMILIES[family]
    model = random_model(kind, BASE | changes, seed=len(family))
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        if lean:
            embedding.mul_(9)
            # Makes near ties of experts rare: with other experts in bfloat16, a token's logits differ by more than a near tie's.
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer[buffer.argsort()] = torch.linspace(-2, 2, len(buffer))
        if lean and not model.config.tie_word_embeddings:
            # In bfloat16 transformers differs from float32 at 0.54% of GPT-OSS's positions with alpha 0.5: sinks take weight from the text.
            model.lm_head.weight.add_(embedding.roll(1, 0), alpha=1.0 if kind == "GptOss" else 0.5)
    return model.to(dtype)


def random_model(kind: str, fields: dict[str, Any], seed: int) -> Any:
    """A `transformers` model. Its matrix products keep the magnitude of their input."""
    torch.manual_seed(seed)
    causal = getattr(transformers, f"{kind}ForCausalLM")
    model = causal(causal.config_class(**fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(float("norm" in name), 0.3)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
    return model


def save_tokenizer(folder: Path, size: int) -> None:
    """A byte-level tokenizer: three control tokens, then single bytes."""
    letters = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD))][: size - 4]
    vocabulary = {letter: 4 + index for index, letter in enumerate(letters)}
    added = [{"id": index, "content": text, "special": index < 3} for index, text in enumerate(["<s>", "<|im_start|>", "</s>", "<call>"])]
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    content = {"model": model, "added_tokens": added, "pre_tokenizer": {"type": "ByteLevel"}}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


def save(model: Any, folder: Path, **options: Any) -> Path:
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, **options)
    save_tokenizer(folder, model.config.vocab_size)
    return folder


@functools.cache
def folder_of(family: str, dtype: torch.dtype = torch.float32, lean: bool = False) -> Path:
    """A Hugging Face folder of one family, written once."""
    folder = Path(tempfile.mkdtemp(prefix="family-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return save(hf_model(family, dtype, lean), folder)


def load(family: str, dtype: torch.dtype = torch.float32, lean: bool = False) -> Llama:
    return open_checkpoint(folder_of(family, dtype, lean)).load("cpu", FEATURE_LAYERS)


def count_refused_damaged(file: Path, whole: bytes, head: int, opened: Path, cases: int = 60) -> int:
    """How many of `cases` random changes in the first `head` bytes raise ValueError. Other errors propagate."""
    rng, refused = random.Random(len(whole)), 0
    for _ in range(cases):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 2, 8))):
            damaged[rng.randrange(min(head, len(whole)))] = rng.choice((0, 127, 255, rng.randrange(256)))
        file.write_bytes(damaged)
        try:
            open_checkpoint(opened)
        except ValueError:
            refused += 1
    return refused


class CachedModel:
    """A model with a cache for two rows, whose pages are in random order."""

    def __init__(self, model: Llama | TransformersModel, length: int = LENGTH, kv_cache_dtype: KvCacheDtype = "auto") -> None:
        self.model = model
        pages = length // PAGE
        sizes = 2, 4, length, PAGE, 2 * pages, model.vocab_size, model.vocab_size, model.feature_size
        limits = Limits(*sizes, kv_cache_dtype=kv_cache_dtype)
        self.buffers = StaticBuffers(model.cache_specs(limits))
        self.tables = 1 + torch.randperm(2 * pages, generator=torch.Generator().manual_seed(0)).view(2, pages)

    @torch.no_grad()
    def run(self, tokens: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Logits and features of positions start .. stop - 1. tokens [B, N]."""
        positions = torch.arange(start, stop).expand(len(tokens), -1)
        tables = self.tables[: len(tokens)]
        slots = tables.gather(1, positions // PAGE) * PAGE + positions % PAGE
        output = self.model(ModelInput(tokens[:, start:stop], positions, slots, tables, PAGE), self.buffers)
        return self.model.logits(output.hidden), output.next_features

    def in_chunks(self, tokens: Tensor, size: int) -> Tensor:
        count = tokens.shape[1]
        return torch.cat([self.run(tokens, start, min(start + size, count))[0] for start in range(0, count, size)], 1)
