"""Baseline: greedy `transformers` generate with xgrammar's logits processor, on the same weights.

Modes: dynamic cache, static cache, static cache with a compiled step, assisted by a smaller model.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from stepgraph.runtime.models.files.weights import llama_slices
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import LlamaConfig
from stepgraph.sampling.grammar import Vocabulary

MODES = ("dynamic", "static", "compiled", "assisted")


class Timed(NamedTuple):
    tokens: list[int]
    first_token_seconds: float  # seconds until the first token
    later_seconds: float  # seconds from the first token to the end


class Clock:
    """A streamer that records the time of the first token; `put` is called with the prompt, then with every token."""

    def __init__(self) -> None:
        self.calls, self.first = 0, 0.0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        pass


def not_available() -> str:
    """Why this baseline cannot run here; empty if it can."""
    missing = [name for name in ("transformers", "xgrammar") if importlib.util.find_spec(name) is None]
    return f"not available: {' and '.join(missing)} not installed; pip install {' '.join(missing)}" if missing else ""


class Generator:
    """A transformers model, and grammars over its vocabulary."""

    def __init__(self, model: Any, tokenizer_info: Any, pad: int) -> None:
        import xgrammar

        self.model, self._pad = model, pad
        self._compiler = xgrammar.GrammarCompiler(tokenizer_info)

    def compile(self, schema: str) -> Any:
        return self._compiler.compile_json_schema(schema, any_whitespace=False)

    def generate(
        self, prompt: Sequence[int], new_tokens: int, grammar: Any = None, mode: str = "dynamic", assistant: Any = None, stops: bool = True
    ) -> Timed:
        """`stops`: stop at a stop token; otherwise generate `new_tokens` tokens. The dynamic cache is the fastest on a CPU."""
        from transformers import CompileConfig
        from xgrammar.contrib.hf import LogitsProcessor

        if mode not in MODES:
            raise ValueError(f"generate.mode: got {mode!r}, expected one of {', '.join(MODES)}")
        clock, device = Clock(), self.model.device
        options: dict[str, Any] = {} if stops else {"min_new_tokens": new_tokens}
        if mode in ("static", "compiled"):
            options |= {"cache_implementation": "static", "disable_compile": mode == "static"}
        if mode == "compiled":
            options["compile_config"] = CompileConfig()
            options["compile_config"]._compile_all_devices = True  # compile on a CPU as well, where this is tested
        if mode == "assisted":
            options["assistant_model"] = assistant
        else:
            options["streamer"] = clock  # assisted generation has no streamer
        start = time.perf_counter()
        output = self.model.generate(
            torch.tensor([list(prompt)], device=device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=device),
            max_new_tokens=new_tokens,
            do_sample=False,
            logits_processor=[LogitsProcessor(grammar)] if grammar is not None else [],
            pad_token_id=self._pad,
            **options,
        )
        tokens = output[0, len(prompt) :].tolist()  # waits for the device
        end = time.perf_counter()
        first = clock.first or start
        return Timed(tokens, first - start, end - first)


class Baseline(Generator):
    """The target of a GGUF file in transformers."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        import transformers
        import xgrammar
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        options = {"gguf_file": path.name, "local_files_only": True}
        config = transformers.AutoConfig.from_pretrained(path.parent, **options)
        model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call, unused-ignore]
        read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]  # type: ignore[no-untyped-call, unused-ignore]
        missing = model.load_state_dict(read, strict=False).missing_keys
        assert missing in ([], ["lm_head.weight"]), missing  # tied to the embedding
        model.tie_weights()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **options)
        info = xgrammar.TokenizerInfo.from_huggingface(self.tokenizer, vocab_size=config.vocab_size)
        super().__init__(model.to(dtype).eval(), info, self.tokenizer.eos_token_id)


def same_weights(target: Llama, vocabulary: Vocabulary) -> Generator:
    """A model of this project in transformers, on the same device."""
    import transformers
    import xgrammar

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    model = _empty(target.config, vocabulary.stop_token_ids, target.embedding.device)
    weights = {name: piece.of(target) for name, piece in llama_slices(target.config).items()}
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"]), missing  # tied to the embedding
    model.tie_weights()
    stops = list(vocabulary.stop_token_ids)
    info = xgrammar.TokenizerInfo(
        list(vocabulary.tokens), xgrammar.VocabType.RAW, vocab_size=target.config.vocab_size, stop_token_ids=stops
    )
    return Generator(model, info, stops[0])


def small_assistant(target: Llama, vocabulary: Vocabulary) -> nn.Module:
    """A random model with two layers and a quarter of the width, to measure the cost of assisted generation."""
    config = target.config
    width = max(config.head_size * 2, config.hidden_size // 4)
    heads = width // config.head_size
    small = LlamaConfig(
        config.vocab_size, width, 2 * width, heads, heads, config.head_size, (None, None), tied=True, dtype=config.dtype, rope=config.rope
    )
    model: nn.Module = _empty(small, vocabulary.stop_token_ids, target.embedding.device)
    return model


def _empty(config: LlamaConfig, stops: Sequence[int], device: torch.device) -> Any:
    """A model of this shape with its initial weights."""
    import transformers

    rope = config.rope
    assert rope.factor == 1.0 and rope.original_length is None and not config.head_norms, config
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call, unused-ignore]
            transformers.LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_size,
                rms_norm_eps=config.norm_epsilon,
                rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
                tie_word_embeddings=config.tied,
                max_position_embeddings=4096,
                bos_token_id=None,
                eos_token_id=list(stops),
                pad_token_id=stops[0],
            ),
            dtype=config.dtype,
        )
    return model.eval()
