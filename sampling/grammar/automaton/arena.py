"""Blocks of one int32 array that hold the images of grammars. Users share a block; without users it is kept for later ones.

Handles offsets and counts, not tensors: the caller copies an image into its block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from stepgraph.sampling.grammar.automaton.library import Image

ALIGNMENT = 4  # in int32: kernels load 16 bytes at once


@dataclass(eq=False)
class ArenaBlock:
    """One image at its place in the arena; it does not move."""

    image: Image
    offset: int  # in int32
    users: int = 0
    num_copied: int = 0  # leading int32 of the image that the caller has copied

    @property
    def end(self) -> int:
        return self.offset + -(-len(self.image) // ALIGNMENT) * ALIGNMENT


class ImageArena:
    """`size` int32 of memory. The first `ALIGNMENT` are not used, so that no image has offset 0.

    An image without users keeps its block until room is needed; the least recently used image is evicted first.
    """

    def __init__(self, size: int) -> None:
        self.size, self.evicted = size, 0
        # By the identity of the image, which the block keeps alive; least recently used first.
        self._blocks: OrderedDict[int, ArenaBlock] = OrderedDict()

    def __len__(self) -> int:
        """The number of images."""
        return len(self._blocks)

    @property
    def used(self) -> int:
        """int32 of all blocks."""
        return sum(block.end - block.offset for block in self._blocks.values())

    @property
    def blocks(self) -> Sequence[ArenaBlock]:
        """By offset."""
        return sorted(self._blocks.values(), key=lambda block: block.offset)

    def acquire(self, image: Image) -> ArenaBlock | None:
        """The block of an image, for one more user; None if the images in use leave no room for it."""
        block = self._blocks.get(id(image)) or self._place(image)
        if block is not None:
            block.users += 1
        return block

    def release(self, block: ArenaBlock) -> None:
        """End one use. Only launches after the last launch of this user may write to the memory again."""
        assert block.users > 0
        block.users -= 1
        self._blocks.move_to_end(id(block.image))

    def _place(self, image: Image) -> ArenaBlock | None:
        """A new block. Evicts as few idle images as possible, least recently used first; None, and no eviction, if all do not suffice."""
        block, kept, evicted = ArenaBlock(image, 0), list(self.blocks), list[ArenaBlock]()
        idle = (one for one in self._blocks.values() if not one.users)
        while (offset := self._gap(kept, block.end)) is None:
            last = next(idle, None)
            if last is None:
                return None
            kept.remove(last)
            evicted.append(last)
        for one in evicted:
            del self._blocks[id(one.image)]
        self.evicted += len(evicted)
        block.offset = offset
        self._blocks[id(image)] = block
        return block

    def _gap(self, kept: Sequence[ArenaBlock], size: int) -> int | None:
        """The lowest offset with `size` free int32. `kept`: blocks in the order of their offsets."""
        offset = ALIGNMENT
        for block in kept:
            if block.offset - offset >= size:
                return offset
            offset = block.end
        return offset if self.size - offset >= size else None
