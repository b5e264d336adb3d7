"""`check_class`: what a registered class must be."""

from __future__ import annotations


def check_class(name: str, backend: object) -> None:
    """Refuse what is no complete backend, has another name, or was written for another contract.

    Raises:
        TypeError: says which.
        ContractMismatch: an `ImportError`; says what changed.
    """
    from attn_backends.interface import AttentionBackend, check_contract  # it loads torch

    if not isinstance(backend, type) or not issubclass(backend, AttentionBackend):
        raise TypeError(f"{backend!r} is not a subclass of attn_backends.AttentionBackend")
    check_contract(f"{backend.__module__}:{backend.__qualname__}", getattr(backend, "contract", None))
    if missing := backend.missing():
        raise TypeError(f"{backend.__qualname__} lacks {', '.join(missing)}: a backend sets them on its class")
    if backend.get_name() != name:
        raise TypeError(f"{backend.__qualname__}.get_name() is {backend.get_name()!r}; it is registered as {name!r}")
