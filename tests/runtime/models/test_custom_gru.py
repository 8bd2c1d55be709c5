"""The recurrent model of docs/own-model.md as target and as draft: the tokens equal those of `nn.GRU` over the whole text."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepgraph import Constraint, Engine, EngineConfig, Job, SamplingParams, Vocabulary
from stepgraph.graphs.model_call import ModelInput
from stepgraph.sampling.grammar import GrammarCompiler, MaskStatus
from tests.helpers.documents import block_with
from tests.helpers.oracles import Answer, accepts

SNIPPET = block_with("class Recurrent")
VOCABULARY = Vocabulary.printable()
WIDTH = VOCABULARY.logits_width
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
CONSTRAINTS = (None, Constraint.regex("[a-e]{2,9}(x|yy)"), Constraint.json_schema({**OBJECT, "additionalProperties": False}))
PROMPTS = ([5], [7, 8, 9, 10, 11, 12, 13], [40, 41, 42])


@functools.cache
def recurrent() -> Any:
    """The class from the documentation."""
    namespace: dict[str, Any] = {"__name__": "readme"}
    exec(SNIPPET[: SNIPPET.index("\n\nvocabulary =")], namespace)
    return namespace["Recurrent"]


@torch.no_grad()
def models(likeness: float, kind: Any = None) -> tuple[Any, Any]:
    """A target, and a draft with the same weights plus noise of this size."""
    torch.manual_seed(11)
    target, draft = (kind or recurrent())("target", WIDTH), recurrent()("draft", WIDTH, fed=True)
    for parameter in target.parameters():
        parameter.mul_(4)  # otherwise the logits hardly depend on the text
    draft.load_state_dict(target.state_dict(), strict=False)
    for name, parameter in draft.named_parameters():
        noise = torch.randn_like(parameter) * likeness
        parameter.copy_(noise if name.startswith("feed") else parameter + noise)
    return target, draft


@torch.no_grad()
def plain(target: Any, prompt: Sequence[int], count: int, constraint: Constraint | None) -> Answer:
    """Greedy decoding in float64, with torch's own recurrence over the whole text each time."""
    whole = nn.GRU(target.feature_size, target.feature_size, batch_first=True).double()
    whole.load_state_dict({f"{name}_l0": value.double() for name, value in target.cell.state_dict().items()})
    matcher = GrammarCompiler(VOCABULARY).compile(constraint).matcher() if constraint else None
    masks, tokens = torch.zeros(1, -(-WIDTH // 32), dtype=torch.int32), list[int]()
    while len(tokens) < count:
        if matcher and matcher.fill_next_token_bitmask(masks, 0) == MaskStatus.COMPLETE:
            return Answer(tokens, "constraint_complete")
        states = whole(target.embedding(torch.tensor([[*prompt, *tokens]])).double())[0]
        logits = (states[0, -1] @ target.head.weight.double().T + target.head.bias.double())[: len(VOCABULARY.tokens)]
        legal = [not matcher or int(masks[0, token // 32]) >> (token % 32) & 1 == 1 for token in range(len(logits))]
        tokens.append(int(logits.masked_fill(~torch.tensor(legal), float("-inf")).argmax()))
        assert matcher is None or matcher.accept_token(tokens[-1])
        if tokens[-1] in VOCABULARY.stop_token_ids:
            return Answer(tokens, "stop")
    return Answer(tokens, "length")


def decode(target: Any, draft: Any, drafts: int, sampling: SamplingParams | None = None, **options: Any) -> tuple[list[Job], float]:
    """Jobs for every prompt under every constraint, three at a time, and accepted drafts per round."""
    sizes = {"max_rows": 3, "max_length": 40, "page_size": 4, "prefill_chunk": 3, "compile_isolation": "none"}
    config = EngineConfig(num_speculative_tokens=drafts, draft_length=drafts, **{**sizes, **options})
    with Engine(target, draft if drafts else None, vocabulary=VOCABULARY, config=config) as engine:
        jobs = [
            engine.submit(prompt, constraint=constraint, sampling=sampling, max_new_tokens=16)
            for prompt in PROMPTS
            for constraint in CONSTRAINTS
        ]
        for _ in engine.stream():
            pass
        stats = engine.stats()
        return jobs, stats.drafts.accepted / stats.rounds


@pytest.mark.parametrize(("drafts", "likeness"), [(0, 0.0), (3, 0.0), (3, 0.3)])
def test_tokens_equal_the_whole_recurrence(drafts: int, likeness: float) -> None:
    target, draft = models(likeness)
    jobs, held = decode(target, draft, drafts, greedy_only=True, buckets=(1, 3))
    for job in jobs:
        assert Answer(job.tokens, str(job.finish_reason)) == plain(target, job.prompt_ids, 16, job.constraint)
    assert len({tuple(job.tokens) for job in jobs}) > 6, "the texts differ"
    assert held == 0 if drafts == 0 else held > 2 if likeness == 0 else held > 0


def test_sampled_texts_are_legal_and_equal_eager_rounds() -> None:
    target, draft = models(0.1)
    sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=4)
    texts = [[job.tokens for job in decode(target, draft, 2, sampling, buckets=(3,), eager=eager)[0]] for eager in (False, True)]
    assert texts[0] == texts[1]
    compiler = GrammarCompiler(VOCABULARY)
    for index, tokens in enumerate(texts[0]):
        constraint = CONSTRAINTS[index % len(CONSTRAINTS)]
        assert constraint is None or accepts(compiler.compile(constraint), tokens, finished=len(tokens) < 16)


def test_one_state_per_row_would_continue_rejected_drafts() -> None:
    """A deliberately wrong model, to show why each slot has its own entry."""

    class OneState(recurrent()):  # type: ignore[misc]
        def before(self, inputs: ModelInput, states: Tensor) -> Tensor:
            return torch.where(inputs.positions[:, :1] > 0, states[inputs.block_tables[:, 0] * inputs.page_size], 0.0)

        def forward(self, inputs: ModelInput, buffers: Any) -> Any:
            output = super().forward(inputs, buffers)
            live = inputs.slots[:, 0] >= inputs.page_size
            kept = torch.where(live, inputs.block_tables[:, 0] * inputs.page_size, 0)
            buffers[f"{self.name}_states"].index_put_((kept,), output.hidden[:, -1])
            return output

    target, draft = models(0.3, OneState)
    wrong = []
    for drafts in (0, 3):
        # without prefix_reuse, as rows would share the place of the state
        jobs, _ = decode(target, draft, drafts, greedy_only=True, buckets=(3,), prefix_reuse=False)
        free = [job for job in jobs if job.constraint is None]
        wrong.append(sum(job.tokens != plain(target, job.prompt_ids, 16, None).tokens for job in free))
    assert wrong[0] == 0 < wrong[1], "without drafts one state is enough"
