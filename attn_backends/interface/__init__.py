"""The five classes of a backend, a file each: backend, metadata with its builder, state, impl; and its capabilities."""

from attn_backends.interface.backend import AttentionBackend
from attn_backends.interface.capabilities import Capabilities, CudaGraphSupport, Rejection, Unsupported
from attn_backends.interface.contract import CONTRACT, ContractMismatch, check_contract
from attn_backends.interface.impl import AttentionImpl
from attn_backends.interface.metadata import AttentionMetadata, AttentionMetadataBuilder
from attn_backends.interface.plans import Plans
from attn_backends.interface.state import AttentionState, GraphState
from attn_backends.interface.steps import AttentionStep, PlannedStep

__all__ = [
    "CONTRACT",
    "AttentionBackend",
    "AttentionImpl",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionState",
    "AttentionStep",
    "Capabilities",
    "ContractMismatch",
    "CudaGraphSupport",
    "GraphState",
    "PlannedStep",
    "Plans",
    "Rejection",
    "Unsupported",
    "check_contract",
]
