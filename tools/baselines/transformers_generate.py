"""What a user would run without this project: `transformers` generate, greedy, with xgrammar's logits processor, on the same weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import xgrammar
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from xgrammar.contrib.hf import LogitsProcessor


class Timed(NamedTuple):
    tokens: list[int]
    first: float  # seconds until the first token
    rest: float  # seconds from there to the end


class Clock(BaseStreamer):
    """Notes when the first token came: `put` is called with the prompt, then with every token."""

    def __init__(self) -> None:
        self.calls, self.first = 0, 0.0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        pass


class Baseline:
    """The target of a GGUF file as transformers runs it."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        told = {"gguf_file": path.name, "local_files_only": True}
        config = transformers.AutoConfig.from_pretrained(path.parent, **told)
        model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call, unused-ignore]
        read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]  # type: ignore[no-untyped-call, unused-ignore]
        missing = model.load_state_dict(read, strict=False).missing_keys
        assert missing in ([], ["lm_head.weight"]), missing  # which is the embedding
        model.tie_weights()
        self.model = model.to(dtype).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **told)
        info = xgrammar.TokenizerInfo.from_huggingface(self.tokenizer, vocab_size=config.vocab_size)
        self._compiler = xgrammar.GrammarCompiler(info)

    def compile(self, schema: str) -> Any:
        return self._compiler.compile_json_schema(schema, any_whitespace=False)

    def generate(self, prompt: Sequence[int], new_tokens: int, grammar: Any = None) -> Timed:
        """With the dynamic cache, its default and the fastest here."""
        clock = Clock()
        processors = [LogitsProcessor(grammar)] if grammar is not None else []
        start = time.perf_counter()
        output = self.model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=new_tokens,
            do_sample=False,
            logits_processor=processors,
            pad_token_id=self.tokenizer.eos_token_id,
            streamer=clock,
        )
        end = time.perf_counter()
        return Timed(output[0, len(prompt) :].tolist(), clock.first - start, end - clock.first)
