"""AMX in plain C (emulated_tiles.h), for kernels in C on CPUs that have none."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

HEADER = Path(__file__).with_name("emulated_tiles.h")
needs_amx = pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs a CPU with AMX")
needs_products = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.cpu._is_avx512_bf16_supported(),
    reason="needs products of bfloat16 by AVX-512 beside them",
)

REFUSED = {"TILES_ALLOWED()": 0}  # as if Linux did: kernels do without


def emulating() -> dict[str, str | int]:
    """What kernels/amx.h is to be told; another text is another library."""
    return {"TILES": f'"{HEADER}"', "TEXT_OF_TILES": zlib.crc32(HEADER.read_bytes())}
