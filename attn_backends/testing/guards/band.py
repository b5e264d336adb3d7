"""One tensor inside a larger allocation: where its borders are, what they hold, and what became of them."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

_NAN = 0x7FFF  # in two bytes: NaN in float16, bfloat16, float32 and float64, and byte by byte in both fp8 types
_LINE = 64  # bytes, as torch aligns tensors of a CPU
_ALIGNMENT = 512  # bytes, as the CUDA allocator aligns tensors: kernels are chosen by it
_LEAST, _MOST = 1024, 1 << 20  # bytes of a border
_MOST_ON_CPU = 1 << 17  # of one that a CPU fills and compares, and of what it fills at either end of fresh memory
EMPTY = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
_OWN = (
    str(Path(torch.__file__).parent),
    *(str(Path(__file__).with_stem(stem)) for stem in ("band", "guard")),
    *(str(Path(__file__).parents[1] / "graphs" / file) for file in ("recorder.py", "host_reads.py")),
)


class Band:
    """The borders of one guarded tensor.

    It holds the allocation until `release`, so that nothing else can lie there before the borders were compared.

    Args:
        slack: bytes behind the tensor that may be written.
    """

    def __init__(self, flat: torch.Tensor, stop: int, where: str, word: int, width: int, slack: int) -> None:
        self.where = where
        self.device = flat.device
        self._stop, self._size = stop, flat.numel()
        self._flat: torch.Tensor | None = flat
        self._weak: Any = flat.untyped_storage()._weak_ref()
        self._slack = slack
        self._pattern = pattern(word, width, flat.device)
        self._frozen: torch.Tensor | None = None

    @staticmethod
    def around(
        tensor: torch.Tensor, where: str, beyond: int, pinned: bool, slack: bool = False, zero: bool = False
    ) -> tuple[Band, torch.Tensor]:
        """A band, and within it a tensor of the same form that holds the pattern too, or zeros.

        Args:
            beyond: what the border holds if the tensor holds integers of 16 bits or more.
            slack: what lies between the tensor's end and the next multiple of 512 bytes may be written. torch's CUDA
                allocator gives it to no one else, and compiled libraries count on that: FlashAttention 2 writes up to
                15 floats behind an LSE of its own where it joins split keys.
        """
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes = (last + 1) * tensor.itemsize
        most = _MOST if tensor.is_cuda else _MOST_ON_CPU
        border = min(max(-(-num_bytes // _ALIGNMENT) * _ALIGNMENT, _LEAST), most)
        size = _LEAST + -(-num_bytes // 8) * 8 + border
        if zero and not pinned and tensor.device.type == "cpu" and size > most:
            flat = _zeros(size)
        else:
            flat = torch.empty(size, dtype=torch.uint8, device=tensor.device, pin_memory=pinned)
            if zero:
                flat.zero_()
        is_integer = tensor.itemsize > 1 and not tensor.is_floating_point() and not tensor.is_complex()
        word, width = (beyond, tensor.itemsize) if is_integer else (_NAN, 2)
        words = flat.view(_INTEGERS[width])
        if zero:
            stop = _LEAST + num_bytes
            whole = -(-stop // 8) * 8
            words[: _LEAST // width].fill_(word)
            words[whole // width :].fill_(word)
            flat[stop:whole] = pattern(word, width, flat.device)[stop % 8 : stop % 8 + whole - stop]
        elif tensor.is_cuda or size <= 4 * most:
            words.fill_(word)
        else:  # a large workspace, of which a CPU would fill more than steps read
            words[: 2 * most // width].fill_(word)
            words[-2 * most // width :].fill_(word)
        allowed = -num_bytes % _ALIGNMENT if slack else 0
        band = Band(flat, _LEAST + num_bytes, where, word, width, allowed)
        inner = flat[_LEAST : _LEAST + num_bytes].view(tensor.dtype).as_strided(
            tensor.shape, tensor.stride(), _LEAST // tensor.itemsize
        )  # fmt: skip
        return band, inner

    def storage(self) -> torch.Tensor | None:
        """The allocation [num_bytes] u8, or None if it is gone."""
        if self._flat is not None:
            return self._flat
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak)
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (self._size,), (1,))

    def freeze(self) -> None:
        """The tensor itself must stay as it is now too."""
        assert self._flat is not None
        self._frozen = self._flat.clone()

    def release(self) -> None:
        """Let others have the memory once nobody else uses the tensor."""
        self._flat = None

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What there is and what there should be, in bytes. None where the allocation is gone."""
        flat = self.storage()
        if flat is None:
            return []
        if self._frozen is not None:
            return [(flat, self._frozen)]
        stop = self._stop + self._slack
        behind = stop % 8
        return [
            (flat[:_LEAST], self._pattern[:_LEAST]),
            (flat[stop:], self._pattern[behind : behind + self._size - stop]),
        ]

    def damage(self) -> str:
        """What was written, in words; empty if nothing was."""
        found, flat = [], self.storage()
        if flat is None or all(torch.equal(*pair) for pair in self.pairs()):
            return ""
        expected = self._frozen
        if expected is None:
            expected = flat.clone()
            for (_, wanted), part in zip(
                self.pairs(), (slice(0, _LEAST), slice(self._stop + self._slack, None)), strict=True
            ):  # fmt: skip
                expected[part] = wanted
        changed = (flat != expected).nonzero().flatten()
        before, behind = changed[changed < _LEAST], changed[changed >= self._stop]
        if len(before):
            found.append(f"{len(before)} bytes up to {_LEAST - int(before[0])} bytes before it were written")
        if len(behind):
            first, last = (int(behind[i]) - self._stop for i in (0, -1))
            found.append(f"{len(behind)} bytes behind it were written, {first} to {last} bytes from its end")
        if len(changed) > len(before) + len(behind):
            found.append("it is an input, and was changed itself")
        return f"{self.where}: " + ", and ".join(found)

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._weak)


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _zeros(size: int) -> torch.Tensor:
    """Memory that is zero as it comes, and costs nothing until it is used: torch writes zeros to a CPU's."""
    memory = np.zeros(size + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return torch.from_numpy(memory[start : start + size])


@lru_cache(maxsize=64)
def pattern(word: int, width: int, device: torch.device) -> torch.Tensor:
    """The longest border there can be, in bytes u8, from a multiple of 8 bytes on."""
    return torch.full(((_MOST + 1024) // width,), word, dtype=_INTEGERS[width], device=device).view(torch.uint8)


def where_in_code() -> str:
    """The innermost line that is neither torch's nor of guards and recorders."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
