"""The adapter declares the contract that it was written for: a package of another major refuses its import."""

from __future__ import annotations

import importlib

import pytest

from attn_backends.adapters.req_to_token import attention
from attn_backends.interface import contract
from attn_backends.interface.contract import ContractMismatch, ContractRelease


def test_another_major_refuses_it_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what changed; the refusal comes before the module defines anything anew."""
    later = (ContractRelease((2, 0), "2028-01-01", removed=("`csr` is gone: read `page_table`.",)), *contract.RELEASES)
    monkeypatch.setattr(contract, "RELEASES", later)
    monkeypatch.setattr(contract, "CONTRACT", (2, 0))
    told = r"the req_to_token adapter was written for contract 1\.0.*`csr` is gone"
    with pytest.raises(ContractMismatch, match=told):
        importlib.reload(attention)
