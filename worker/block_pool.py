"""Physical KV blocks with reference counts. Knows nothing of tensors, sequences or snapshots.

Entries of recurrent state are counted by a pool of their own, as blocks of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ZERO_BLOCK = 0  # always zero, referenced by padded block tables, never handed out


class OutOfBlocks(Exception):
    """More blocks were asked for than are free. Nothing was taken."""

    def __init__(self, asked: int, free: int) -> None:
        super().__init__(f"{asked} blocks asked for, {free} free")
        self.asked = asked
        self.free = free


class BlockError(ValueError):
    """A block id that is free, reserved or out of range was shared or released: a fault of the caller."""


class BlockPool:
    """Block ids 1..num_blocks-1, each free (count 0) or held by `refcount` owners.

    A block with more than one owner must not be written: whoever wants to write copies it first.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        if num_blocks < 1 or block_tokens < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_tokens} tokens is nonsense")
        self.block_tokens = block_tokens
        self._refs = [0] * num_blocks
        # One byte a block, 1 where free: bytearray.find() then finds a run of free blocks at memory speed.
        self._free = bytearray(b"\x01") * num_blocks
        self._free[ZERO_BLOCK] = 0
        self._free_count = num_blocks - 1
        self.releases = 0  # rises with every release: who found no room need not look again before it does

    @property
    def total_count(self) -> int:
        """Blocks that can be handed out, free or not."""
        return len(self._refs) - 1

    @property
    def free_count(self) -> int:
        return self._free_count

    @property
    def used_count(self) -> int:
        return self.total_count - self._free_count

    @property
    def refcounts(self) -> Sequence[int]:
        """Owners by block id, for reading only."""
        return self._refs

    def refcount(self, block: int) -> int:
        return self._refs[block]

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.block_tokens)

    def allocate(self, n: int) -> list[int]:
        """`n` blocks with one owner each, rising, and consecutive where a long enough run is free.

        All or nothing: raises `OutOfBlocks`.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > self._free_count:
            raise OutOfBlocks(n, self._free_count)
        start = self._free.find(b"\x01" * n)
        blocks = list(range(start, start + n)) if start >= 0 else self._lowest_free(n)
        for block in blocks:
            self._refs[block] = 1
            self._free[block] = 0
        self._free_count -= n
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more owner for each block. Raises `BlockError` and changes nothing where one is not in use."""
        if not blocks:
            return
        if min(blocks) <= ZERO_BLOCK or max(blocks) > self.total_count:
            raise BlockError("a block is not in use")
        refs = self._refs
        for block in blocks:  # one pass: a snapshot of a long prompt has a thousand blocks
            count = refs[block]
            if not count:
                for taken in blocks[: blocks.index(block)]:
                    refs[taken] -= 1
                raise BlockError("a block is not in use")
            refs[block] = count + 1

    def release(self, blocks: Iterable[int]) -> int:
        """One owner less for each block; returns how many became free.

        A block named twice must have two owners. Raises `BlockError` before anything changes.
        """
        blocks = tuple(blocks)
        self._require_used(blocks)
        refs, free = self._refs, self._free
        overdrawn = False
        for block in blocks:
            refs[block] -= 1
            overdrawn |= refs[block] < 0
        if overdrawn:
            for block in blocks:
                refs[block] += 1
            raise BlockError("a block was released more often than it is held")
        self.releases += bool(blocks)
        freed = 0
        for block in blocks:
            if not refs[block] and not free[block]:
                free[block] = 1
                freed += 1
        self._free_count += freed
        return freed

    def check(self) -> None:
        """Raises `AssertionError` where the free map, the counts and the reference counts disagree."""
        assert self._refs[ZERO_BLOCK] == 0, "the zero block has an owner"
        for block, (refs, free) in enumerate(zip(self._refs, self._free, strict=True)):
            assert refs >= 0, f"block {block} has {refs} owners"
            assert bool(free) == (refs == 0 and block != ZERO_BLOCK), f"block {block}: free {free}, owners {refs}"
        assert self._free_count == sum(self._free), "the count of free blocks is wrong"

    def _lowest_free(self, n: int) -> list[int]:
        blocks, block = [], ZERO_BLOCK
        for _ in range(n):
            block = self._free.find(1, block + 1)
            blocks.append(block)
        return blocks

    def _require_used(self, blocks: Sequence[int]) -> None:
        if not blocks:
            return
        if min(blocks) <= ZERO_BLOCK or max(blocks) > self.total_count or not all(self._refs[b] for b in blocks):
            raise BlockError("a block is not in use")
