"""The classes that vLLM asks for by path: `AB_TRITON` is TRITON by that name, `CPU_ATTN__TORCH` is TORCH as CPU_ATTN.

They are made when they are first asked for, so that a name costs nothing. Another process makes the same ones.
"""

from __future__ import annotations

from typing import Any

from attn_backends.adapters.vllm.backend import MLAServedBackend, ServedBackend
from attn_backends.adapters.vllm.builder import ServedBuilder
from attn_backends.adapters.vllm.plugin import PREFIX, is_mla
from attn_backends.interface.contract import check_contract
from attn_backends.registry import get_entry

check_contract("the vLLM adapter", (1, 1))


def __getattr__(name: str) -> Any:
    member, separator, ours = name.partition("__")
    if name.startswith(PREFIX):
        member, ours = name, name.removeprefix(PREFIX)
    elif not (member and separator and ours):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made = serve(member, get_entry(ours).name, name)
    return made


def serve(member: str, ours: str, qualname: str) -> type[ServedBackend]:
    """vLLM's backend class under the name of one of its members, served by a backend of ours."""
    base = MLAServedBackend if is_mla(ours) else ServedBackend
    names = {"__module__": __name__, "ours": ours}
    builder = type(f"{qualname}_Builder", (ServedBuilder,), names)
    impl = type(f"{qualname}_Impl", (base.impl_base,), names)
    return type(qualname, (base,), names | {"member": member, "builder_cls": builder, "impl_cls": impl})
