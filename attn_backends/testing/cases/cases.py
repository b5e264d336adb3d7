"""The shared cases: batch shapes, worked examples and tolerances, as data (`data/cases.json`). Needs no torch."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BatchShape(_Row):
    """How long each request of a batch is; `seq_lens` include this step's `query_lens`."""

    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]


class CsrCase(_Row):
    """A page table and its CSR form, worked by hand. Without `page_lists` only the lengths are pinned."""

    page_size: int
    seq_lens: tuple[int, ...]
    indptr: tuple[int, ...]
    last_page_len: tuple[int, ...]
    page_lists: tuple[tuple[int, ...], ...] | None = None
    indices: tuple[int, ...] | None = None


class SplitCase(_Row):
    """`expect` is (decode rows, prefill rows, decode tokens, prefill tokens)."""

    query_lens: tuple[int, ...]
    decode_threshold: int
    expect: tuple[int, int, int, int]


class LocalCase(_Row):
    """Local attention as virtual batches: each row is cut where its queries cross a chunk's edge."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    chunk: int
    page_size: int
    virtual_query_lens: tuple[int, ...]
    virtual_seq_lens: tuple[int, ...]
    note: str


class WindowCase(_Row):
    """Which keys the last query of a sequence sees: `keys` of them, from `oldest_key_of_last_query` on."""

    window_left: int
    seq_len: int
    oldest_key_of_last_query: int
    keys: int


class Cases(_Row):
    """All of `cases.json`."""

    about: str
    batches: dict[str, BatchShape]
    csr: tuple[CsrCase, ...]
    split_decodes_and_prefills: tuple[SplitCase, ...]
    local_attention_virtual_batches: tuple[LocalCase, ...]
    window: tuple[WindowCase, ...]
    tolerances: dict[str, float | str]

    def tolerance(self, dtype: object) -> float:
        """Largest allowed norm(out - ref) / norm(ref) for outputs of `dtype`, a torch dtype or its name.

        An fp8 cache needs none of its own: the reference reads the same fp8 values.
        """
        name = str(dtype).removeprefix("torch.")
        known = {key: value for key, value in self.tolerances.items() if isinstance(value, float)}
        if name not in known:
            raise KeyError(f"no tolerance for {name!r}; known: {', '.join(known)}")
        return known[name]


@cache
def load_cases() -> Cases:
    """The cases shipped with the package, parsed once."""
    text = files("attn_backends.testing.data").joinpath("cases.json").read_text(encoding="utf-8")
    return Cases.model_validate_json(text)
