"""A round over buffers of its own, and random states to run it from."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from stepgraph.graphs import BufferSpec, Limits, StaticBuffers, TapeBackend, run_eager
from stepgraph.graphs.buffers import Column, round_specs
from stepgraph.graphs.model import ModelPair
from stepgraph.graphs.round import Round
from stepgraph.runtime.models.toy import ToyDraft
from stepgraph.sampling.grammar import Constraint
from stepgraph.sampling.grammar.host_link import HostLink, MatcherRow
from tests.toy_engines import COMPILER, TARGET, VOCABULARY

ROWS = 4
GRAMMAR = Constraint.regex("[a-f]{0,12}(x|yy)")


class Bench:
    """A round over its own buffers, and random states to run it from."""

    def __init__(self, k: int, draft_masks: bool = True) -> None:
        draft = ToyDraft(TARGET, 0.8)
        self.limits = Limits(
            max_rows=ROWS,
            num_speculative_tokens=k,
            max_length=48,
            page_size=8,
            num_pages=24,
            vocab_size=VOCABULARY.logits_width,
            feature_size=3,
        )
        self.models = ModelPair(TARGET, draft if k else None)
        width = VOCABULARY.logits_width
        outputs = (
            BufferSpec("out_logits", (ROWS, k + 1, width), torch.float32),
            BufferSpec("out_features", (ROWS, k + 1, 3), torch.float32),
            BufferSpec("in_features", (ROWS, k + 1, 3), torch.float32),
            BufferSpec("out_tokens", (ROWS,), torch.int64),
        )
        specs = [*round_specs(self.limits), *TARGET.cache_specs(self.limits), *draft.cache_specs(self.limits), *outputs]
        self.buffers = StaticBuffers(specs, constants={"target": TARGET, "draft": draft})
        b = self.buffers
        self.host = HostLink(b.state_host, b.drafts_host, b.masks_host, b.tags_host)
        self.round = Round(self.limits, self.models, self.host, draft_masks)

    def randomise(self, seed: int) -> None:
        """A state that rounds could have left: live, finished and fresh rows, masks that fit and masks that do not."""
        pick, b, k = random.Random(seed), self.buffers, self.limits.num_speculative_tokens
        torch.manual_seed(seed)
        for name in ("toy_target_cache", "toy_draft_cache"):
            b[name].random_(0, self.limits.vocab_size)
        b.in_features.copy_(torch.randint(0, 1 << 14, b.in_features.shape))
        b.row_masks.random_(-(2**31), 2**31 - 1)
        pages = torch.randperm(self.limits.num_pages) + 1
        for row in range(ROWS):
            length = pick.randint(1, 40)
            state = {
                Column.OWNER: row + 1,
                Column.GENERATED: pick.choice([0, pick.randint(0, length)]),
                Column.LAST_TOKEN: pick.randrange(self.limits.vocab_size),
                Column.ACCEPTED: 0,
                Column.FINISH: pick.choice([1, 1, 1, 2, 0]),
                Column.DRAFT_COUNT: pick.randint(0, k),
                Column.LENGTH: length,
                Column.MAX_LENGTH: pick.randint(length + 1, 48),
                Column.CONSTRAINED: pick.randint(0, 1),
                Column.DRAFT_LIMIT: pick.randint(0, k),
            }
            b.row_state[row] = torch.tensor([state[column] for column in Column])
            b.row_block_tables[row] = pages[row * 6 : row * 6 + 6]
            b.row_drafts[row] = torch.randint(-1, self.limits.vocab_size, (k,))
            for index in range(k + 1):
                owner = state[Column.OWNER] if pick.random() < 0.8 else 99
                b.row_tags[row, index] = torch.tensor([owner, state[Column.GENERATED], index, pick.choice([1, 1, 1, 1, 2, 3, 4, 5])])
            b.row_stop_ids[row] = torch.randint(-1, self.limits.vocab_size, (self.limits.max_stop_ids,))
        order = list(range(ROWS))
        pick.shuffle(order)
        used = pick.randint(1, ROWS)
        b.batch_rows.copy_(torch.tensor([*order[:used], *[self.limits.dummy_row] * (ROWS - used)]))

    def announce(self, size: int) -> None:
        """Fresh matchers that stand where the random rows say: committed tokens, and no draft walked."""
        rows: list[MatcherRow | None] = []
        for row in self.buffers.batch_rows[:size].tolist():
            state = self.buffers.row_state[row]
            if row == self.limits.dummy_row or not state[Column.CONSTRAINED]:
                rows.append(None)
                continue
            matcher = COMPILER.compile(GRAMMAR).matcher()
            rows.append(MatcherRow(int(state[Column.OWNER]), matcher, committed=int(state[Column.GENERATED])))
        self.host.announce(rows)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: self.buffers[name].clone() for name in self.buffers}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            self.buffers[name].copy_(tensor)

    def compare(self, step: Callable[[StaticBuffers], None], before_run: Callable[[], None] = lambda: None, states: int = 8) -> None:
        backend = TapeBackend(poison="every")
        try:
            recorded = backend.capture(step, self.buffers)
            for seed in range(states):
                self.randomise(seed)
                start = self.state()
                before_run()
                run_eager(step, self.buffers)
                eager = self.state()
                self.restore(start)
                before_run()
                recorded.replay()
                replayed = self.state()
                changed = [name for name in eager if not torch.equal(start[name], eager[name])]
                assert changed, "the step did nothing at this state"
                for name in eager:
                    assert torch.equal(eager[name].view(torch.uint8), replayed[name].view(torch.uint8)), name
        finally:
            backend.close()
