"""The version of the contract between this package and what is written against it: backends, and adapters to engines.

A backend's class says `contract = (1, 0)`, an adapter calls `check_contract`. What a version covers, and how long
what is deprecated stays, is in docs/contract.md.
"""

from __future__ import annotations

from dataclasses import dataclass

Version = tuple[int, int]  # major: what was right before may be wrong; minor: more can be said, nothing else changes


@dataclass(frozen=True)
class ContractRelease:
    """One version: what came, what is to go, and what went, each a sentence that says what to write instead."""

    version: Version
    date: str  # of the release, YYYY-MM-DD
    added: tuple[str, ...] = ()
    deprecated: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()  # in a new major alone; word for word what an earlier version deprecated


CONTRACT: Version = (1, 1)

# Newest first. docs/contract.md has the same text, and a test compares them.
RELEASES = (
    ContractRelease(
        (1, 1),
        "2026-11-26",
        added=(
            "Graphs of mixed batches, of backends that declare `CudaGraphSupport.ALWAYS`: their state has "
            "`has_mixed_graphs`, and its `graph_cls` takes a fourth argument, `num_tokens`, with a `query_len` of 0. "
            "An engine calls `mixed_graph_clone` and `replanned_mixed`, and makes batches by `from_tensors` with "
            "`for_graph` and `is_mixed`. Others are asked for none of it.",
            "`AttentionImpl.forward` takes a cache as one tensor of keys and values too, and new keys and values of "
            "any dtype and last stride: `attend` gets them in the layer's dtype, their last dimension in one piece.",
            "A builder's `build` calls `check_batch` first, which refuses batches above the limits and those of other "
            "page sizes, and calls `check_lengths`; `AttentionImpl.forward` refuses pages that are not as its layer's.",
            "Metadata may name the spec that a step is `planned_for`: `AttentionImpl.forward` refuses it to others.",
            "A step has `check_plan`, which `AttentionImpl.forward` calls before it writes: a backend that holds one "
            "plan a group raises a `RuntimeError` there for a step of an earlier one. By default nothing is refused.",
            "`attn_backends` itself offers `validate_options`, `as_kv_cache`, `copy_pages` and `swap_pages`. Builders, "
            "states, impls and `Plans` refuse options that are a mapping: they take what `validate_options` returns.",
        ),
    ),
    ContractRelease(
        (1, 0),
        "2026-11-25",
        added=(
            "A backend's class declares `contract`, the version it was written for, and an adapter calls "
            "`check_contract`. What was written before there were versions adds that line.",
            "A backend sets `name`, `impl_cls`, `metadata_cls`, `builder_cls` and `state_cls`, and its impl has "
            "`attend`; `get_*` methods and `forward` are the base's.",
            "A builder may set a lower `decode_threshold` on itself than its class has, for the layers that it serves: "
            "an engine reads it off the builder.",
            "An impl is called by `forward` alone. `trace` and `trace_inputs`, of before there were versions, are "
            "asked for no more: leave them out.",
        ),
    ),
)


class ContractMismatch(ImportError):
    """What was written for another contract than this package has, or does not say for which. `fix` is what to type."""

    def __init__(self, who: str, reason: str, fix: str) -> None:
        super().__init__(who, reason, fix)
        self.who, self.reason, self.fix = who, reason, fix

    def __str__(self) -> str:
        return f"{self.who} {self.reason}. Try: {self.fix}"


def check_contract(who: str, written_for: Version | None) -> None:
    """Refuse what cannot work with this package's contract.

    Args:
        who: a backend or an adapter, by name.
        written_for: the version that it declares; an older minor of the same major works.

    Raises:
        ContractMismatch: an `ImportError`: another major, a minor that is still to come, or no version; says what
            changed, and what to type.
        TypeError: not a pair of numbers.
    """
    if written_for is None:
        raise ContractMismatch(
            who,
            "does not say which version of attn_backends' contract it was written for",
            f"contract = {CONTRACT} on its class, once it passes this version's conformance kit (docs/contract.md)",
        )
    if not (isinstance(written_for, tuple) and [type(number) for number in written_for] == [int, int]):
        raise TypeError(f"{who}: contract is {written_for!r}; it must be a pair of numbers, such as {CONTRACT}")
    if written_for[0] == CONTRACT[0] and written_for <= CONTRACT:
        return
    mismatch = f"was written for contract {dotted(written_for)}, and this attn_backends has {dotted(CONTRACT)}"
    if written_for > CONTRACT:
        raise ContractMismatch(who, mismatch, "pip install --upgrade attn-backends, or an older release of it")
    later = [release for release in reversed(RELEASES) if release.version > written_for and release.version[1] == 0]
    gone = "; ".join(
        [
            f"{dotted(release.version)}: {sentence.rstrip('.')}"
            for release in later
            for sentence in release.removed + release.added
        ]
    )
    raise ContractMismatch(who, f"{mismatch}. What changed: {gone}", f"a release of it for contract {CONTRACT[0]}.x")


def dotted(version: Version) -> str:
    """A version in words: 1.0."""
    return ".".join(map(str, version))
