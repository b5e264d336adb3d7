"""FLASH_ATTN over FlashAttention 4, which compiles a kernel when it is first called: `warm_up` makes them all.

A kernel is compiled for all that `_flash_attn_fwd` is told beside addresses and lengths: dtypes, head dims, heads and
pages, the mask, and which of its tensors there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from attn_backends.backends.flash_attn.options import FlashAttnOptions
from attn_backends.backends.flash_attn.state import FlashAttnState
from attn_backends.registry import get_backend
from attn_backends.spec import AttentionType, KVCacheSpec, Limits, plan_groups
from attn_backends.testing.cases.random_layers import KINDS, random_layers
from attn_backends.testing.harness import run_backend
from attn_backends.testing.kit.base import KitBase
from tests.helpers import flash_attn_backends
from tests.helpers.flash_attn_backends import FlashAttn4, emulated

NAME = "FLASH_ATTN_FLASH_ATTN_4_EMULATED"
OPTIONAL = ("cu_seqlens_k", "seqused_k", "page_table", "learnable_sink")
SERVED = [kind for kind in KINDS if not any(word in kind for word in ("alibi", "chunks", "rope"))]


class Kit(KitBase):
    backend_name = NAME
    dtypes = (torch.bfloat16,)


def kind_of(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, given: dict[str, Any]) -> tuple[Any, ...]:
    """All of a call but addresses and lengths. One query token a row is a kind of its own."""
    window = tuple(given[side] is None or given[side] for side in ("window_size_left", "window_size_right"))
    return (
        query.dtype, keys.dtype, query.shape[1:], keys.shape[-2:], values.shape[-1],
        keys.shape[1] if keys.dim() == 4 else None, given["causal"], window, bool(given["softcap"]),
        given["return_lse"], given["max_seqlen_q"] > 1, *(given[name] is not None for name in OPTIONAL),
    )  # fmt: skip


@contextmanager
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[Any, ...]]]:
    found: set[tuple[Any, ...]] = set()
    provider = get_backend(NAME).get_state_cls().providers[0]  # type: ignore[attr-defined]
    real = provider.modules[0]._flash_attn_fwd

    def recorded(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **given: Any) -> Any:
        found.add(kind_of(query, keys, values, {name: given.get(name) for name in OPTIONAL} | given))
        return real(query, keys, values, **given)

    with monkeypatch.context() as patch:
        patch.setattr(provider.modules[0], "_flash_attn_fwd", recorded)
        yield found


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.sampled
def test_traffic_makes_no_first_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit()
    for layer in random_layers(kind, 3):
        page_size = layer.page_size if layer.page_size in FlashAttn4.page_sizes else 16
        changes = {"num_qo_heads": layer.num_qo_heads, "num_kv_heads": layer.num_kv_heads, "head_dim": 64}
        spec = kit.feature_spec(layer.feature, **changes)
        batch = kit.make_batch(spec, layer.rows, page_size=page_size, layout=layer.layout)
        limits = Limits(64, 4096, 8192)
        (group,) = plan_groups({0: batch.spec})
        backend: Any = get_backend(NAME)
        state = backend.get_state_cls()([group], batch.cache, limits, "cpu", options=FlashAttnOptions())
        with calls(monkeypatch) as warm:
            state.warm_up()
        with calls(monkeypatch) as seen:
            run_backend(backend, batch, want_lse=layer.want_lse)
        assert seen
        assert seen <= warm


def test_libraries_that_come_compiled_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []

    class State(FlashAttnState):
        providers = (emulated(flash_attn_backends.VllmFa3),)

    spec = Kit().make_spec(head_dim=64)
    assert spec.attention_type is AttentionType.DECODER
    state = State(plan_groups({0: spec}), KVCacheSpec(64, 16), Limits(4, 64, 512), "cpu")
    monkeypatch.setattr(type(State.providers[0]), "attend", lambda *given: called.append(given))
    state.warm_up()
    assert not called
