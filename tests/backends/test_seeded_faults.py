"""Seeded faults of kernels replace what stands in the kernels' sources, once.

Faults take long to be found, so `make test` leaves most of them to `make test-rest`; a kernel that changes where a
fault is to be seeded is seen here.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton")
hopper = import_module("tests.backends.test_hopper_emulated")
hopper_dims = import_module("tests.backends.test_hopper_dims_emulated")
hopper_splits = import_module("tests.backends.test_hopper_splits_emulated")
joins = import_module("tests.backends.triton.test_joins")
mixed = import_module("tests.backends.triton.test_mixed")
one_block = import_module("tests.backends.triton.test_one_block")
short_rows = import_module("tests.backends.triton.test_short_rows")
splits = import_module("tests.backends.triton.test_splits")
wide_queries = import_module("tests.backends.test_wide_queries_emulated")

DECODE, PREFILL = "attn_backends.backends.triton.kernels", "attn_backends.kernels.prefill"
SEEDED: dict[str, list[tuple[str, str]]] = {  # a source, and the pieces of it that faults replace
    "hopper": [(f"attn_backends.{hopper.MODULES[of.split()[0]]}", old) for of, old, *_ in hopper.FAULTS.values()],
    "hopper dims": [(f"{PREFILL}.hopper_kernel", old) for _, old, _ in hopper_dims.FAULTS.values()],
    "hopper splits": [(f"{PREFILL}.{name}", old) for name, old, _ in hopper_splits.FAULTS.values()],
    "waiting": [(f"{DECODE}.split_joins", old) for old, _ in joins.WAITING_FAULTS.values()],
    "combining": [(f"{DECODE}.decode", old) for old, _ in {**joins.COMBINING_FAULTS, **joins.KERNEL_FAULTS}.values()],
    "mixed": [(f"{PREFILL}.list_kernel", old) for old, _ in mixed.FAULTS.values()],
    "one block": [(f"{PREFILL}.portable_kernel", old) for old, _ in one_block.FAULTS.values()],
    "short rows": [(f"{DECODE}.decode", old) for old, _ in short_rows.FAULTS.values()],
    "splits": [(f"{PREFILL}.{name}", old) for name, old, _ in splits.FAULTS.values()],
    "joins of splits": [(f"{PREFILL}.split_kernels", old) for old, _ in splits.JOIN_FAULTS.values()],
    "wide queries": [(f"{PREFILL}.hopper_kernel", old) for edits in wide_queries.FAULTS.values() for old, _ in edits],
}


@pytest.mark.parametrize("faults", SEEDED)
def test_what_faults_replace_stands_once(faults: str) -> None:
    for name, old in SEEDED[faults]:
        source = import_module(name).__file__
        assert source is not None
        assert Path(source).read_text().count(old) == 1, f"{name}: {old!r}"
