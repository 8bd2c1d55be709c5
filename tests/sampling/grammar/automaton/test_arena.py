"""The arena of grammar images: blocks under random orders of requests, against a model of the memory."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stepgraph.sampling.grammar.automaton.arena import ALIGNMENT, ArenaBlock, ImageArena
from stepgraph.sampling.grammar.automaton.library import Image


def image(size: int, value: int = 1) -> Image:
    return np.full(size, value, np.int32)


class ArenaMachine(RuleBasedStateMachine):
    """Writes each image into its block when it is placed. A block in use, or found again, must hold its image."""

    @initialize(size=st.sampled_from([0, 7, 24, 40, 64]))
    def start(self, size: int) -> None:
        self.arena, self.memory = ImageArena(size), np.zeros(size, np.int32)
        self.images: list[Image] = []
        self.uses: list[ArenaBlock] = []
        self.last_use: list[ArenaBlock] = []  # idle blocks, least recently used first

    @rule(size=st.integers(1, 30))
    def compiled(self, size: int) -> None:
        self.images.append(image(size, len(self.images) + 1))

    @precondition(lambda self: self.images)
    @rule(choice=st.integers(0, 50))
    def begin(self, choice: int) -> None:
        wanted = self.images[choice % len(self.images)]
        before, idle = {id(block): block for block in self.arena.blocks}, list(self.last_use)
        block = self.arena.acquire(wanted)
        gone = [old for old in before.values() if old not in self.arena.blocks]
        assert {*map(id, gone)} == {*map(id, idle[: len(gone)])}, "only the least recently used idle blocks are evicted"
        if block is None:
            assert not gone, "blocks were evicted for an image that does not fit"
            assert not self.fits(wanted, [old for old in before.values() if old.users]), "the image was refused although it fits"
            return
        assert block.image is wanted
        if block in before.values():
            assert not gone and block.num_copied == len(wanted), "an image in the arena needs no eviction and no copy"
        else:
            assert block.num_copied == 0
            assert not gone or not self.fits(wanted, [old for old in before.values() if old not in idle[: len(gone) - 1]]), "extra eviction"
            self.memory[block.offset : block.offset + len(wanted)] = wanted
            block.num_copied = len(wanted)
        self.last_use = [old for old in self.last_use if old not in gone and old is not block]
        self.uses.append(block)

    @precondition(lambda self: self.uses)
    @rule(choice=st.integers(0, 50))
    def end(self, choice: int) -> None:
        block = self.uses.pop(choice % len(self.uses))
        self.arena.release(block)
        if block not in self.uses:
            self.last_use.append(block)

    def fits(self, wanted: Image, blocks: list[ArenaBlock]) -> bool:
        free = np.ones(self.arena.size, bool)
        for block in blocks:
            free[block.offset : block.end] = False
        aligned = -(-len(wanted) // ALIGNMENT) * ALIGNMENT
        starts = range(ALIGNMENT, self.arena.size - aligned + 1, ALIGNMENT)  # offset 0 means that a row has no image
        return any(free[start : start + aligned].all() for start in starts)

    @invariant()
    def blocks_hold_their_images(self) -> None:
        if not hasattr(self, "arena"):
            return
        end = 0
        for block in self.arena.blocks:
            assert block.offset % ALIGNMENT == 0 and end <= block.offset and block.end <= self.arena.size
            assert (self.memory[block.offset : block.offset + len(block.image)] == block.image).all()
            assert block.users == sum(use is block for use in self.uses)
            end = block.end
        assert self.arena.used == sum(block.end - block.offset for block in self.arena.blocks) and len(self.arena) == len(self.arena.blocks)


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_image_is_shared_by_its_users_and_kept_after_them() -> None:
    arena, one, other, large = ImageArena(ALIGNMENT + 16), image(5), image(8, 2), image(9, 3)
    first, second = arena.acquire(one), arena.acquire(one)
    assert first is not None and second is first and first.users == 2 and (first.offset, first.end) == (4, 12)
    third = arena.acquire(other)
    assert third is not None and (third.offset, len(arena), arena.used) == (12, 2, 16)
    arena.release(first)
    assert arena.acquire(large) is None and len(arena) == 2, "blocks in use are not evicted"
    arena.release(first)
    assert arena.acquire(one) is first, "an idle image is found again"
    arena.release(first)
    arena.release(third)
    placed = arena.acquire(large)
    assert placed is not None and (placed.offset, arena.evicted, len(arena)) == (4, 2, 1), "nine integers take the space of both blocks"
