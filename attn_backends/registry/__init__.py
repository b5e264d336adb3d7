"""Which backends exist, and which one serves these layers on this device. Importing it loads no kernel library."""

from attn_backends.registry.measured import Load
from attn_backends.registry.options import validate_options
from attn_backends.registry.register import register_backend
from attn_backends.registry.select import auto_order, explain, explain_for, select_backend
from attn_backends.registry.table import (
    AUTO,
    BackendEntry,
    BackendImportError,
    UnknownBackendError,
    backends,
    get_backend,
    get_entry,
)
from attn_backends.registry.verdicts import Explanation, LayerRejection, Selection, Verdict

__all__ = [
    "AUTO",
    "BackendEntry",
    "BackendImportError",
    "Explanation",
    "LayerRejection",
    "Load",
    "Selection",
    "UnknownBackendError",
    "Verdict",
    "auto_order",
    "backends",
    "explain",
    "explain_for",
    "get_backend",
    "get_entry",
    "register_backend",
    "select_backend",
    "validate_options",
]
