import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.block_pool import BlockError, BlockPool, OutOfBlocks


def test_the_zero_block_is_never_handed_out():
    pool = BlockPool(9, 16)
    assert pool.allocate(8) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert pool.total_count == pool.used_count == 8
    with pytest.raises(BlockError):
        pool.share([0])
    with pytest.raises(BlockError):
        pool.release([0])


def test_too_large_an_allocation_takes_nothing():
    pool = BlockPool(5, 16)
    pool.allocate(1)
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate(4)
    assert (caught.value.asked, caught.value.free) == (4, 3)
    assert pool.free_count == 3
    pool.check()


def test_a_run_of_free_blocks_is_preferred_to_scattered_ones():
    pool = BlockPool(12, 16)
    blocks = pool.allocate(11)
    pool.release([blocks[1], blocks[3], *blocks[6:9]])
    assert pool.allocate(3) == blocks[6:9]
    assert pool.allocate(2) == [blocks[1], blocks[3]]


def test_a_shared_block_is_freed_by_its_last_owner():
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2)
    pool.share(blocks)
    assert pool.release(blocks) == 0
    assert pool.refcount(blocks[0]) == 1
    assert pool.release(blocks) == 2
    assert pool.free_count == 3


def test_sharing_or_releasing_a_free_block_changes_nothing():
    pool = BlockPool(4, 16)
    (block,) = pool.allocate(1)
    for act in (pool.share, pool.release):
        for bad in (2, 4, -1):
            with pytest.raises(BlockError):
                act([block, bad])
        assert pool.refcount(block) == 1
    pool.check()


def test_releasing_a_block_twice_for_one_reference_is_refused():
    pool = BlockPool(4, 16)
    (block,) = pool.allocate(1)
    with pytest.raises(BlockError):
        pool.release([block, block])
    assert pool.refcount(block) == 1
    pool.check()


@pytest.mark.parametrize(("blocks", "tokens"), [(0, 16), (-1, 16), (4, 0)])
def test_a_nonsense_pool_is_refused(blocks, tokens):
    with pytest.raises(ValueError, match="nonsense"):
        BlockPool(blocks, tokens)


def test_a_negative_allocation_is_refused():
    with pytest.raises(ValueError, match="-1"):
        BlockPool(4, 16).allocate(-1)


def test_check_sees_a_block_that_is_free_and_owned():
    pool = BlockPool(4, 16)
    (block,) = pool.allocate(1)
    pool._free[block] = 1
    with pytest.raises(AssertionError):
        pool.check()


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 6)), max_size=60))
def test_free_plus_owned_is_the_total_and_no_block_has_two_owners_it_does_not_know(steps):
    pool = BlockPool(17, 4)
    owned: list[list[int]] = []
    for act, n in steps:
        if act == "allocate":
            if n > pool.free_count:
                with pytest.raises(OutOfBlocks):
                    pool.allocate(n)
                continue
            held = {block for blocks in owned for block in blocks}
            fresh = pool.allocate(n)
            assert fresh == sorted(set(fresh))
            assert held.isdisjoint(fresh)
            owned.append(fresh)
        elif owned and act == "share":
            blocks = owned[n % len(owned)]
            pool.share(blocks)
            owned.append(list(blocks))
        elif owned:
            blocks = owned.pop(n % len(owned))
            still = {block for other in owned for block in other}
            assert pool.release(blocks) == len(set(blocks) - still)
        counts = [sum(block in blocks for blocks in owned) for block in range(17)]
        assert list(pool.refcounts) == counts
        assert pool.free_count + pool.used_count == pool.total_count == 16
        pool.check()


def test_sharing_gives_back_what_it_took_before_it_was_refused():
    pool = BlockPool(6, 16)
    one, two = pool.allocate(2)
    with pytest.raises(BlockError):
        pool.share([two, one, one, 4, two, 4])
    assert (pool.refcount(one), pool.refcount(two), pool.refcount(4)) == (1, 1, 0)
    pool.share(())
    pool.check()
