"""A round and its stages over separate buffers, random states to run them from, and the comparison of replay with eager."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

from stepgraph.graphs import Backend, BufferSpec, Limits, StaticBuffers, drafting, host_nodes, run_eager, stages
from stepgraph.graphs.batch import Batch, read_batch
from stepgraph.graphs.capture import Step
from stepgraph.graphs.model import Models, Proposer
from stepgraph.graphs.proposing import text_specs
from stepgraph.graphs.round import Round
from stepgraph.graphs.round_specs import forced_specs, grammar_specs, look_up_specs, round_specs
from stepgraph.graphs.row_layout import Column
from stepgraph.runtime.models.toy import ToyDraft
from stepgraph.sampling.grammar import Constraint, GrammarCompiler
from stepgraph.sampling.grammar.automaton.grammar import split_tensors, token_tensors
from stepgraph.sampling.grammar.automaton.library import Field, Image
from stepgraph.sampling.grammar.compile.limits import DEFAULTS
from stepgraph.sampling.grammar.link.native import open_host_link
from stepgraph.sampling.grammar.link.protocol import MatcherRow
from stepgraph.sampling.grammar.matchers.forced import Forcing, token_lookup
from stepgraph.sampling.kernels import Emission
from stepgraph.sampling.kernels.advance import PlaceColumn
from stepgraph.sampling.rng import draft_seed
from stepgraph.sampling.sampler import Param
from tools.gpu.checks.context import VOCABULARY, compiled, toy_target

ROWS = 4
GRAMMAR = Constraint.regex("[a-f]{0,12}(x|yy)")
ARENA_INTS, IMAGE_OFFSET = 1 << 14, 64


@functools.cache
def image_of(constraint: Constraint) -> Image:
    """The automaton tables of a constraint over VOCABULARY."""
    image = GrammarCompiler(VOCABULARY, backend="automaton").compile(constraint).image
    assert image is not None and len(image) <= ARENA_INTS - IMAGE_OFFSET
    return image


class RoundBench:
    """Buffers, models and host link of one round, on any device."""

    def __init__(
        self,
        backend: Backend,
        k: int,
        draft_masks: bool = True,
        proposer: Proposer | None = None,
        forced_drafts: bool = False,
        look_up: Proposer | None = None,
        host_link: str = "auto",
        device_grammars: bool = False,
    ) -> None:
        self.backend = backend
        num_tokens = len(VOCABULARY.tokens)
        target = toy_target(backend.device)
        draft = ToyDraft(target, 0.8).to(backend.device)
        self.limits = Limits(
            max_rows=ROWS,
            num_speculative_tokens=k,
            max_length=48,
            page_size=8,
            num_pages=24,
            vocab_size=VOCABULARY.logits_width,
            num_tokens=num_tokens,
            feature_size=target.feature_size,
        )
        self.models = Models(target, draft if k and proposer is None else None, proposer, look_up)
        self.draft = draft
        outputs = (
            BufferSpec("out_logits", (ROWS, k + 1, num_tokens), torch.float32),
            BufferSpec("out_features", (ROWS, k + 1, target.feature_size), target.feature_dtype),
            BufferSpec("in_features", (ROWS, k + 1, target.feature_size), target.feature_dtype),
            BufferSpec("out_tokens", (ROWS,), torch.int64),
        )
        specs = [*round_specs(self.limits, proposer is None), *target.cache_specs(self.limits), *draft.cache_specs(self.limits)]
        specs += (*outputs, *text_specs(self.limits)) if self.models.reads_text else outputs
        specs += look_up_specs(self.limits) if look_up else ()
        specs += forced_specs(self.limits) if forced_drafts else ()
        tables = token_tensors(VOCABULARY, backend.device) if device_grammars else None
        split = split_tensors(VOCABULARY, backend.device) if device_grammars and forced_drafts else None
        specs += grammar_specs(self.limits, ARENA_INTS, DEFAULTS.automaton_depth, split is not None) if device_grammars else ()
        constants: dict[str, Tensor | nn.Module] = {"target": target, "draft": draft, **(tables._asdict() if tables else {})}
        constants |= {"token_slots": split.token_slots} if split else {}
        self.buffers = StaticBuffers(specs, backend.device, constants=constants)
        b = self.buffers
        forcing = Forcing(token_lookup(VOCABULARY), b.forced_host) if forced_drafts else None
        pinned = b.state_host, b.drafts_host, b.masks_host, b.tags_host
        self.host = open_host_link(host_link, *pinned, depth=256, forcing=forcing, contents_host=b.contents_host)
        self.round = Round(self.limits, self.models, self.host, draft_masks, tables=tables, split=split)

    def randomise(self, seed: int) -> None:
        """A random valid state. At most one slot is padding: two would race for the dummy row, which is harmless but not reproducible."""
        pick, rng, b = random.Random(seed), torch.Generator().manual_seed(seed), self.buffers
        k, vocab = self.limits.num_speculative_tokens, self.limits.vocab_size

        def numbers(name: str, low: int, high: int) -> None:
            b[name].copy_(torch.randint(low, high, tuple(b[name].shape), generator=rng))

        numbers("toy_target_cache", 0, vocab)
        numbers("toy_draft_cache", 0, vocab)
        numbers("in_features", 0, 1 << 14)
        numbers("row_masks", -(2**31), 2**31 - 1)
        numbers("row_stop_ids", -1, self.limits.num_tokens)
        numbers("row_drafts", -1, self.limits.num_tokens)
        if "row_text" in b:
            numbers("row_text", -1, 4)
            b.row_text[:, self.limits.max_length].fill_(-1)
        if "row_looked_up" in b:
            numbers("row_looked_up", 0, 2)
        self._randomise_sampling(rng)
        if "grammar_arena" in b:
            image = image_of(GRAMMAR)
            b.grammar_arena[IMAGE_OFFSET : IMAGE_OFFSET + len(image)].copy_(torch.tensor(image))
            numbers("row_places", 0, int(image[Field.STATES]))
            b.row_places[:, :, PlaceColumn.DEPTH].fill_(0)  # of a grammar without a stack
        if "row_forced_text" in b:
            b.row_forced_text.zero_()  # no text is known
        states, tags = b.row_state.cpu(), b.row_tags.cpu()
        for row in range(ROWS):
            length = pick.randint(1, 40)
            state = {
                Column.OWNER: row + 1,
                Column.GENERATED: pick.choice([0, pick.randint(0, length)]),
                Column.LAST_TOKEN: pick.randrange(vocab),
                Column.FINISH: pick.choice([1, 1, 1, 1, 2, 0]),  # mostly running
                Column.DRAFT_COUNT: pick.randint(0, k),
                Column.LENGTH: length,
                Column.MAX_LENGTH: pick.randint(length + 1, 48),
                Column.CONSTRAINED: pick.randint(0, 1),
                Column.DRAFT_LIMIT: pick.randint(0, k),
            }
            row_seed = pick.getrandbits(63) - (row % 2 << 63)  # of odd rows negative
            state |= {Column.SEED: row_seed, Column.DRAFT_SEED: draft_seed(row_seed)}
            if "grammar_arena" in b:
                state[Column.IMAGE] = state[Column.CONSTRAINED] * pick.choice([0, IMAGE_OFFSET, IMAGE_OFFSET])
            states[row] = torch.tensor([state.get(column, 0) for column in Column])
            for index in range(k + 1):
                owner = row + 1 if pick.random() < 0.8 else 99
                tags[row, index] = torch.tensor([owner, state[Column.GENERATED], index, pick.choice([1, 1, 1, 1, 2, 3, 4, 5])])
        b.row_state.copy_(states)
        b.row_tags.copy_(tags)
        b.row_block_tables[:ROWS].copy_((torch.randperm(self.limits.num_pages, generator=rng) + 1).view(ROWS, -1))
        order = [*range(ROWS), self.limits.dummy_row]
        pick.shuffle(order)
        b.batch_rows.copy_(torch.tensor(order[:ROWS]))

    def _randomise_sampling(self, rng: torch.Generator) -> None:
        """Settings, counts and draft distributions of every row, including the dummy row."""
        b, rows, width = self.buffers, self.limits.rows, self.limits.num_tokens

        def choice(*values: float) -> Tensor:
            return torch.tensor(values)[torch.randint(0, len(values), (rows,), generator=rng)]

        columns = {
            Param.TEMPERATURE: choice(0, 0, 0.7, 1, 2),
            Param.TOP_K: choice(0, 0, 3, 20),
            Param.TOP_P: choice(1, 1, 0.8),
            Param.MIN_P: choice(0, 0, 0.1),
            Param.REPETITION_PENALTY: choice(1, 1, 1.3, 0.7),
            Param.PRESENCE_PENALTY: choice(0, 0.5, -1),
            Param.FREQUENCY_PENALTY: choice(0, 0.25, -0.5),
            Param.MIN_NEW_TOKENS: choice(0, 0, 5, 40),
            Param.TOP_LOGPROBS: choice(0),
        }
        b.row_params.copy_(torch.stack([columns[column] for column in Param], 1))
        used = torch.arange(self.limits.max_bias_ids) < torch.randint(0, width, (rows, 1), generator=rng)
        some = torch.rand(rows, width, generator=rng).argsort(1)  # distinct ids
        ids = torch.nn.functional.pad(some, (0, self.limits.max_bias_ids), value=-1)[:, : self.limits.max_bias_ids]
        ids = torch.where(used, ids, -1)
        values = torch.randn(ids.shape, generator=rng)
        values = torch.where(torch.rand(ids.shape, generator=rng) < 0.2, float("-inf"), values)
        b.row_bias_ids.copy_(ids)
        b.row_biases.copy_(torch.where(ids >= 0, values, 0.0))
        b.row_prompt_seen.copy_(torch.rand(rows, width, generator=rng) < 0.3)
        b.row_output_counts.copy_(torch.randint(-3, 4, (rows, width), generator=rng).clamp(min=0))
        b.row_draft_probs.copy_(torch.rand(b.row_draft_probs.shape, generator=rng).softmax(-1))
        b.row_certain.copy_(torch.rand(b.row_certain.shape, generator=rng) < (0.3 if self.models.proposer is None else 2))

    def push_batch(self, size: int) -> None:
        """Push new matchers for the constrained rows."""
        rows: list[MatcherRow | None] = []
        states = self.buffers.row_state.cpu()
        for row in self.buffers.batch_rows[:size].tolist():
            grammar = compiled(GRAMMAR)
            constrained = row != self.limits.dummy_row and bool(states[row, Column.CONSTRAINED]) and not states[row, Column.IMAGE]
            committed = int(states[row, Column.GENERATED])
            rows.append(self.host.row(int(states[row, Column.OWNER]), grammar.matcher(), committed) if grammar and constrained else None)
        self.host.push_batch(rows)

    def stage_steps(self, constrained: bool, sampled: bool = False) -> dict[str, Step]:
        """Every stage as a step of its own. K must be at least 3."""
        limits, target, draft = self.limits, self.models.target, self.draft

        def logits(b: StaticBuffers) -> Tensor:
            return target.logits(b.in_features)[..., : limits.num_tokens]

        def target_verify(b: StaticBuffers) -> None:
            verified, features = stages.target_verify(b, read_batch(b, ROWS), target, limits)
            b.out_logits.copy_(verified)
            b.out_features.copy_(features)

        def accept_in(b: StaticBuffers, batch: Batch) -> Emission:
            if constrained:
                drafting.check_masks(b, batch.rows, 0, batch.drafts.shape[1] + 1)
            return stages.accept(b, batch, logits(b), constrained, sampled)[0]

        def accept(b: StaticBuffers) -> None:
            accept_in(b, read_batch(b, ROWS))

        def draft_prefill(b: StaticBuffers) -> None:
            batch = read_batch(b, ROWS)
            drafted, features = drafting.draft_prefill(b, batch, accept_in(b, batch), b.in_features, draft, limits)
            b.out_logits[:, 0].copy_(drafted)
            b.out_features[:, :1].copy_(features)

        def draft_decode(b: StaticBuffers) -> None:
            batch = read_batch(b, ROWS)
            drafted, features = drafting.draft_decode(b, batch, 2, batch.drafts[:, 0], b.in_features[:, :1], draft, limits)
            b.out_logits[:, 0].copy_(drafted)
            b.out_features[:, :1].copy_(features)
            mask = drafting.grammar_mask_of(b, batch, 3) if constrained else None
            b.out_tokens.copy_(drafting.choose_draft(b, batch, 3, drafted, batch.live, mask, sampled))

        def place_masks(b: StaticBuffers) -> None:
            tags = b.row_tags[:ROWS, 1].clone()
            tags[:, 2].copy_(b.batch_rows % 4)
            b.tags_host[1].copy_(tags, non_blocking=True)
            b.masks_host[1].copy_(b.row_masks[:ROWS, 0].contiguous(), non_blocking=True)
            host_nodes.place_masks(b, b.batch_rows[:ROWS], 1)

        return {step.__name__: step for step in (target_verify, accept, draft_prefill, draft_decode, place_masks)}

    def compare(self, step: Step, states: int, before_run: Callable[[], None] = lambda: None) -> int:
        """Replay and eager from the same states must leave the same bits. Returns how many replays were compared."""
        recorded = self.backend.capture(step, self.buffers)
        for seed in range(states):
            self.randomise(seed)
            start = self.snapshot()
            before_run()
            run_eager(step, self.buffers)
            self.backend.synchronize()  # before pinned buffers are read, and written for the replay
            eager = self.snapshot()
            self.restore(start)
            before_run()
            recorded.replay()
            self.backend.synchronize()
            replayed = self.snapshot()
            assert any(not torch.equal(start[name], eager[name]) for name in eager), "the step changed nothing at this state"
            for name in eager:
                ours, theirs = self.defined_part(name, eager[name]), self.defined_part(name, replayed[name])
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), f"{name} differs from eager at state {seed}"
        return states

    def snapshot(self) -> dict[str, Tensor]:
        return {name: self.buffers[name].clone() for name in self.buffers}

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        for name, tensor in snapshot.items():
            self.buffers[name].copy_(tensor)

    def defined_part(self, name: str, tensor: Tensor) -> Tensor:
        """The part of a buffer with a defined value: padding positions collide on the scratch page, which padding reads."""
        if name.endswith("_cache"):
            return tensor[self.limits.page_size :].contiguous()
        if name == "row_draft_probs":
            return tensor[:ROWS].contiguous()
        if name in ("results", "results_logprobs", "out_logits", "out_features", "out_tokens"):
            used = (self.buffers.batch_rows != self.limits.dummy_row).to(tensor.device)
            return tensor[used].contiguous()
        return tensor
