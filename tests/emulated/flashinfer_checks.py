"""What the emulated FlashInfer's wrappers check, and refuse as the real ones do."""

from __future__ import annotations

import torch

from tests.emulated.flashinfer_modules import FA2, FA3, FP8_DTYPES

DType = str | torch.dtype


def dtype_of(dtype: DType | None) -> torch.dtype:
    """A dtype by itself or by name.

    Raises:
        TypeError: it is neither.
    """
    found = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise TypeError(f"dtype must be a string or torch.dtype, got {type(dtype)}")
    return found


def prefill_backend(backend: str, q_dtype: torch.dtype, kv_dtype: torch.dtype, pos_encoding_mode: str) -> str:
    """fa3 where `auto` takes it on an H100, else fa2."""
    if backend != "auto":
        return backend
    if pos_encoding_mode != "NONE":
        return FA2
    return FA2 if kv_dtype in FP8_DTYPES and q_dtype not in FP8_DTYPES else FA3


def not_emulated(**options: object) -> None:
    """Refuse what the real package takes and this one does not.

    Raises:
        NotImplementedError: an option is neither None nor False.
    """
    for name, value in options.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}={value!r} is not emulated")


def check_dtypes(query: torch.Tensor, key: torch.Tensor, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Refuse other dtypes than the planned ones with a ValueError."""
    for name, tensor, planned, kind in (
        ("q", query, q_dtype, "q_data_type"),
        ("k", key, kv_dtype, "kv_data_type"),
    ):
        if tensor.dtype is not planned:
            raise ValueError(
                f"The dtype of {name} {tensor.dtype} does not match the {kind} {planned} specified in plan function."
            )


def check_num_queries(query: torch.Tensor, planned: int) -> None:
    """Refuse other than the planned number of tokens with a ValueError."""
    if query.shape[0] != planned:
        raise ValueError(
            f"q.shape[0] ({query.shape[0]}) does not match qo_indptr[-1] ({planned}). q must have shape "
            "[total_tokens, num_heads, head_dim] where total_tokens = qo_indptr[-1]."
        )


def check_dims(tensor: torch.Tensor, dims: int, name: str) -> None:
    if tensor.dim() != dims:
        raise ValueError(f"{name} must be {dims}-D, got {list(tensor.shape)}")


def check_buffers(where: str, **buffers: torch.Tensor | None) -> None:
    """Refuse a graph wrapper without its buffers."""
    for name, buffer in buffers.items():
        if not isinstance(buffer, torch.Tensor):
            raise ValueError(f"{name} should be a torch.Tensor in {where} mode")


def checked_num_rows(num_rows: int, most: int | None) -> int:
    """The most tokens that a graph wrapper plans for: those of its first plan.

    Raises:
        ValueError: there are more now.
    """
    if most is not None and num_rows > most:
        raise ValueError(
            f"The total number of rows in qo_indptr {num_rows} in cuda graph mode cannot exceed the number of rows set "
            f"during initialization {most}."
        )
    return num_rows if most is None else most


def check_shape(
    tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor, name: str
) -> None:
    """As the real `check_shape_dtype_device`, and contiguous, as kernels write it.

    Raises:
        ValueError: a wrong shape, dtype or device.
        RuntimeError: not contiguous.
    """
    for what, got, expected in (
        ("shape", tuple(tensor.shape), shape),
        ("dtype", tensor.dtype, dtype),
        ("device", tensor.device, like.device),
    ):
        if got != expected:
            raise ValueError(f"Invalid {what} of {name}: expected {expected}, got {got}")
    if not tensor.is_contiguous():
        raise RuntimeError(f"{name} must be contiguous, got strides {tensor.stride()}")


def lse_for(query: torch.Tensor, lse: torch.Tensor | None, wanted: bool) -> torch.Tensor | None:
    """[num_tokens, num_qo_heads] f32: the given one, or a new one. If it is not wanted, as given: kernels fill it."""
    shape = (query.shape[0], query.shape[1])
    if not wanted:
        return lse
    if lse is None:
        return torch.empty(shape, dtype=torch.float32, device=query.device)
    check_shape(lse, shape, torch.float32, query, "lse")
    return lse
