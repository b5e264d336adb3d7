"""The owners of the KV pool's pages: a free list, reference counts, and a prefix cache with LRU eviction."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile

import numpy as np

from attn_backends.batch.page_table import IntArray


class OutOfPages(RuntimeError):
    """More pages were asked for than are available."""


class PageAllocator:
    """Page ids of one pool, on the host. A page is always in exactly one of three places:

    - used: one or more requests refer to it. If it is full it may be published under its digest, and be shared.
    - cached: nobody refers to it, but it can still be found by its digest. It is taken for something else when the
      free list is empty, the least recently used first.
    - free: nobody refers to it and it holds nothing worth finding.

    A digest names a page's tokens, all tokens before them and the request's cache salt, so equal digests mean equal
    keys and values: one pool has one model, one dtype and one pair of scales. Whatever else made the keys of equal
    tokens differ between requests would have to be in the salt.

    Args:
        prefix_caching: off, `extend_digests` makes none, so nothing is ever published or found.
    """

    def __init__(self, num_pages: int, page_size: int, prefix_caching: bool = True) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages ({num_pages}) and page_size ({page_size}) must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: low ids go out first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._refcounts = [0] * num_pages
        self._page_of: dict[bytes, int] = {}  # published pages, used or cached
        self._digest_of: dict[int, bytes] = {}  # the same, the other way
        self.peak_used = 0  # the largest `num_used` since the start, or since `reset_peak`

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages that someone refers to."""
        return self.num_pages - self.num_available

    def reset_peak(self) -> None:
        """Measure `peak_used` anew from here."""
        self.peak_used = self.num_used

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold that many tokens."""
        return -(-num_tokens // self.page_size)

    def num_available_beside(self, pages: Sequence[int]) -> int:
        """What `num_available` would be after `take(pages)`."""
        return self.num_available - sum(self._refcounts[page] == 0 for page in pages)

    def allocate(self, count: int) -> IntArray:
        """`count` pages [count] i32, each with one reference.

        Raises:
            OutOfPages: fewer are available; nothing is taken.
        """
        if count > self.num_available:
            raise OutOfPages(
                f"{count} pages were asked for and {self.num_available} of {self.num_pages} are available: "
                "free pages first, or make the pool larger (cache.memory, cache.num_pages)"
            )
        pages = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - len(pages) :]
        pages += [self._evict() for _ in range(count - len(pages))]
        for page in pages:
            self._refcounts[page] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return np.array(pages, np.int32)

    def take(self, pages: Sequence[int]) -> None:
        """One more reference to each page, as found by `match`."""
        for page in pages:
            if self._refcounts[page] == 0:
                if page not in self._cached:
                    raise ValueError(
                        f"page {page} is free: take() is for pages in use or cached, allocate() for others"
                    )
                del self._cached[page]
            self._refcounts[page] += 1
        self.peak_used = max(self.peak_used, self.num_used)

    def free(self, pages: Sequence[int] | IntArray) -> None:
        """One reference less to each page of a sequence, given in order.

        Published pages stay in the cache, the sequence's last ones to be evicted before its first.
        """
        for page in np.asarray(pages, np.int32)[::-1].tolist():
            if self._refcounts[page] == 0:
                raise ValueError(f"page {page} is not in use: it was freed twice")
            self._refcounts[page] -= 1
            if self._refcounts[page] == 0:
                if page in self._digest_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def free_all(self) -> None:
        """Take all references back. Published pages stay in the cache, those that were in use to be evicted last.

        Only what was published is asked of what is there, so it mends what an interrupted call left.
        """
        self._digest_of = {page: key for page, key in self._digest_of.items() if self._page_of.get(key) == page}
        self._page_of = {key: page for page, key in self._digest_of.items()}
        unused = [page for page in self._cached if page in self._digest_of]
        used = [page for page in reversed(self._digest_of) if page not in self._cached]
        self._cached = OrderedDict.fromkeys([*unused, *used])
        self._free = [page for page in range(self.num_pages - 1, -1, -1) if page not in self._digest_of]
        self._refcounts = [0] * self.num_pages

    def extend_digests(self, digests: list[bytes], token_ids: Sequence[int], cache_salt: str | None = None) -> None:
        """Append the digests of a sequence's full pages that `digests` does not have yet.

        Args:
            cache_salt: what the chain of digests starts from, the same at every call for a sequence. Sequences share
                pages under equal salts alone.
        """
        first, last = len(digests), len(token_ids) // self.page_size
        if not self.prefix_caching or first >= last:
            return
        tokens = array("q", token_ids[first * self.page_size : last * self.page_size])
        page_bytes = self.page_size * tokens.itemsize
        whole, parent = tokens.tobytes(), digests[-1] if digests else _root(cache_salt)
        for start in range(0, len(whole), page_bytes):
            parent = blake2b(parent + whole[start : start + page_bytes], digest_size=16).digest()
            digests.append(parent)

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Pages, used or cached, of the longest prefix of `digests` that is published. `take` them before use."""
        found = (self._page_of.get(digest, -1) for digest in digests)
        return list(takewhile(lambda page: page >= 0, found))

    def publish(self, page: int, digest: bytes) -> None:
        """Let `match` find a page in use whose keys and values are all written, and will not change.

        Where two pages hold the same tokens the first one stays published.
        """
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._digest_of.pop(page)]
        return page


def _root(cache_salt: str | None) -> bytes:
    """The start of a chain. Personalised, so that no salt has the digest of a page, whatever it spells."""
    if cache_salt is None:
        return b""
    return blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"cache_salt").digest()
