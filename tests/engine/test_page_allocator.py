"""Pages are in one place at a time, and a digest always finds the tokens that it names."""

from array import array

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from attn_backends.engine.page_allocator import OutOfPages, PageAllocator

PAGE_SIZE = 2


def digests_of(allocator: PageAllocator, tokens: list[int]) -> list[bytes]:
    digests: list[bytes] = []
    allocator.extend_digests(digests, tokens)
    return digests


def publish(allocator: PageAllocator, tokens: list[int]) -> list[int]:
    """Allocate and publish the full pages of a sequence; the caller has one reference to each."""
    digests = digests_of(allocator, tokens)
    pages = allocator.allocate(len(digests)).tolist()
    for page, digest in zip(pages, digests, strict=True):
        allocator.publish(page, digest)
    return pages


def test_allocate_gives_each_page_once_and_counts() -> None:
    allocator = PageAllocator(4, PAGE_SIZE)
    pages = allocator.allocate(3)
    assert pages.dtype == np.int32
    assert pages.tolist() == [0, 1, 2]
    assert (allocator.num_used, allocator.num_available, allocator.peak_used) == (3, 1, 3)
    allocator.free(pages)
    assert (allocator.num_used, allocator.num_available, allocator.peak_used) == (0, 4, 3)
    allocator.reset_peak()
    assert allocator.peak_used == 0


def test_out_of_pages_says_how_many_and_takes_nothing() -> None:
    allocator = PageAllocator(4, PAGE_SIZE)
    allocator.allocate(3)
    with pytest.raises(OutOfPages, match="2 pages were asked for and 1 of 4 are available"):
        allocator.allocate(2)
    assert allocator.num_available == 1
    assert len(allocator.allocate(1)) == 1


def test_misuse_is_refused() -> None:
    allocator = PageAllocator(4, PAGE_SIZE)
    pages = allocator.allocate(1)
    allocator.free(pages)
    with pytest.raises(ValueError, match="freed twice"):
        allocator.free(pages)
    with pytest.raises(ValueError, match="page 0 is free"):
        allocator.take([0])
    with pytest.raises(ValueError, match="at least 1"):
        PageAllocator(0, PAGE_SIZE)


def test_match_finds_the_longest_prefix_of_full_pages() -> None:
    allocator = PageAllocator(8, PAGE_SIZE)
    pages = publish(allocator, [1, 2, 3, 4, 5])
    assert len(pages) == 2
    assert allocator.match(digests_of(allocator, [1, 2, 3, 4, 9, 9])) == pages
    assert allocator.match(digests_of(allocator, [1, 2, 9, 9])) == pages[:1]
    assert allocator.match(digests_of(allocator, [3, 4])) == []  # the same tokens behind others are another page
    assert allocator.match(digests_of(allocator, [1])) == []


def test_digests_grow_as_if_made_at_once() -> None:
    allocator = PageAllocator(8, PAGE_SIZE)
    digests: list[bytes] = []
    for end in range(8):
        allocator.extend_digests(digests, [5, 6, 7, 8, 5, 6, 7][:end])
    assert digests == digests_of(allocator, [5, 6, 7, 8, 5, 6, 7])
    assert len(set(digests)) == 3


SALTS = [None, "", "a", "b", "a\x00", "?", "\udc80", "\udc81", "\ud83d\ude00", "é", "e\u0301", "x" * 4000]


def test_a_salt_makes_every_digest_another() -> None:
    """Equal salts give equal digests; unequal ones none in common, at no page."""
    allocator = PageAllocator(8, PAGE_SIZE)
    chains: list[list[bytes]] = []
    for salt in SALTS:
        whole: list[bytes] = []
        allocator.extend_digests(whole, [1, 1, 1, 1, 1, 1], salt)
        grown: list[bytes] = []
        for end in range(7):
            allocator.extend_digests(grown, [1] * end, salt)
        assert grown == whole
        chains.append(whole)
    assert len({digest for chain in chains for digest in chain}) == 3 * len(SALTS)


def test_a_page_has_one_digest() -> None:
    """Nothing finds it under another, nor under its own once it holds something else."""
    allocator = PageAllocator(1, PAGE_SIZE)
    digests, (page,) = digests_of(allocator, [1, 2, 3, 4]), allocator.allocate(1).tolist()
    for digest in digests:
        allocator.publish(page, digest)
    assert (allocator.match(digests[:1]), allocator.match(digests[1:])) == ([page], [])
    allocator.free([page])
    allocator.allocate(1)
    assert (allocator.match(digests[:1]), allocator.match(digests[1:])) == ([], [])


def test_a_salt_that_spells_tokens_is_no_page_of_them() -> None:
    """Nobody who may choose a salt can meet another's pages by it."""
    allocator = PageAllocator(8, PAGE_SIZE)
    plain, salted = digests_of(allocator, [65, 66, 67, 68]), []
    allocator.extend_digests(salted, [67, 68], bytes(array("q", [65, 66])).decode())
    assert salted[0] not in plain
    assert digests_of(allocator, [67, 68])[0] != salted[0]


def test_a_cached_page_stays_until_it_is_taken_for_something_else() -> None:
    allocator = PageAllocator(4, PAGE_SIZE)
    tokens = [1, 2, 3, 4]
    pages = publish(allocator, tokens)
    allocator.free(pages)
    assert allocator.num_used == 0
    assert allocator.num_available == 4
    allocator.allocate(2)  # the free list goes first
    assert allocator.match(digests_of(allocator, tokens)) == pages
    assert allocator.num_available_beside(pages) == 0
    allocator.allocate(1)  # the sequence's last page goes before its first
    assert allocator.match(digests_of(allocator, tokens)) == pages[:1]
    allocator.allocate(1)
    assert allocator.match(digests_of(allocator, tokens)) == []


def test_least_recently_used_goes_first() -> None:
    allocator = PageAllocator(3, PAGE_SIZE)
    old, new = publish(allocator, [1, 1]), publish(allocator, [2, 2])
    allocator.free(old)
    allocator.free(new)
    allocator.take(old)  # used again, so `new` is now the older one
    allocator.free(old)
    allocator.allocate(2)
    assert allocator.match(digests_of(allocator, [1, 1])) == old
    assert allocator.match(digests_of(allocator, [2, 2])) == []


def test_a_shared_page_is_free_after_its_last_user() -> None:
    allocator = PageAllocator(2, PAGE_SIZE)
    pages = publish(allocator, [1, 1])
    allocator.take(pages)
    allocator.free(pages)
    assert allocator.num_used == 1
    allocator.free(pages)
    assert allocator.num_used == 0


def test_of_two_equal_pages_the_first_is_found() -> None:
    allocator = PageAllocator(3, PAGE_SIZE)
    first, second = publish(allocator, [1, 1]), publish(allocator, [1, 1])
    assert allocator.match(digests_of(allocator, [1, 1])) == first
    allocator.free(second)
    assert allocator.match(digests_of(allocator, [1, 1])) == first


def test_prefix_caching_off_finds_nothing() -> None:
    allocator = PageAllocator(4, PAGE_SIZE, prefix_caching=False)
    assert digests_of(allocator, [1, 2, 3, 4]) == []
    assert allocator.match([]) == []


class Pool(RuleBasedStateMachine):
    """Sequences come and go; `contents` is what each page was last filled with, as a KV pool would hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(6, PAGE_SIZE)
        self.held: list[list[int]] = []  # page lists, one reference each
        self.contents: dict[int, tuple[int, ...]] = {}  # page → its tokens and all before them

    @rule(tokens=st.lists(st.integers(0, 1), max_size=9))
    def start(self, tokens: list[int]) -> None:
        digests = digests_of(self.allocator, tokens)
        hits = self.allocator.match(digests)
        for i, page in enumerate(hits):
            assert self.contents[page] == tuple(tokens[: (i + 1) * PAGE_SIZE])
        missing = self.allocator.pages_for(len(tokens)) - len(hits)
        fits = missing <= self.allocator.num_available_beside(hits)
        self.allocator.take(hits)
        if not fits:
            with pytest.raises(OutOfPages):
                self.allocator.allocate(missing)
            self.allocator.free(hits)
            return
        fresh = self.allocator.allocate(missing).tolist()
        assert not {page for pages in self.held for page in pages} & set(fresh)
        pages = hits + fresh
        for i in range(len(hits), len(pages)):
            self.contents[pages[i]] = tuple(tokens[: (i + 1) * PAGE_SIZE])
            if i < len(digests):
                self.allocator.publish(pages[i], digests[i])
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.allocator.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def every_page_is_used_or_available(self) -> None:
        used = {page for pages in self.held for page in pages}
        assert self.allocator.num_used == len(used)
        assert self.allocator.num_used + self.allocator.num_available == self.allocator.num_pages
        assert self.allocator.peak_used >= self.allocator.num_used


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = Pool.TestCase
