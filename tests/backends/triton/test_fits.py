"""Tiles fit into a GPU's shared memory: by their own estimate, and as the compiler counts it, without a GPU."""

from __future__ import annotations

import functools
import importlib
import json
import re
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, KVCacheSpec, MLASpec
from tests.helpers.interpreted import INTERPRETED

triton = pytest.importorskip("triton", reason="needs triton")
tuning = pytest.importorskip("attn_backends.backends.triton.tuning")
tiles = pytest.importorskip("attn_backends.backends.mla.triton_mla.tuning")
fitting = pytest.importorskip("attn_backends.kernels.tiles")
launching = pytest.importorskip("attn_backends.kernels.launch")
launch = pytest.importorskip("attn_backends.kernels.prefill.launch")
prefill_tiles = pytest.importorskip("attn_backends.kernels.prefill.tiles")
Pdl = pytest.importorskip("attn_backends.kernels.pdl").Pdl

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled"), pytest.mark.sampled,
]  # fmt: skip

BACKENDS = Path(tuning.__file__).parents[1]
HOPPER, AMPERE, SMALL = 227 << 10, 163 << 10, 99 << 10  # bytes of a program, of compute capability 9.0, 8.0 and 8.6
HOPPER_SHARED, RESERVED, REGISTERS = 228 << 10, 1 << 10, 65536  # of a multiprocessor, of that for each program, and its
TRITON_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
POINTERS = {
    **dict.fromkeys(("lse", "partial_acc", "partial_ml", "slopes", "sinks"), "*fp32"),
    **dict.fromkeys(("page_table", "seq_lens", "query_start_loc", "key_start_loc", "counters"), "*i32"),
    **dict.fromkeys(("work_items", "more_items", "item_pages"), "*i32"),
    **dict.fromkeys(("scale", "value_scale", "soft_cap"), "fp32"),
}
WITHOUT_DESCRIPTORS = {"key_desc": None, "value_desc": None}
ALIGNED = {"query_token", "query_head", "key_page", "key_slot", "key_head", "value_page", "value_slot", "value_head",
           "out_token", "out_head", "output_token", "output_head", "weight_head", "weight_row",
           "slot_step"}  # fmt: skip


def spec_of(dim: int, dim_vo: int, dtype: torch.dtype, cache_dtype: torch.dtype | None = None) -> AttentionSpec:
    return AttentionSpec(8, 2, dim, head_dim_vo=dim_vo, dtype=dtype, cache_dtype=cache_dtype or dtype)


def shared_bytes(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, capability: int) -> int:
    """As the compiler lays a kernel out."""
    from triton.compiler import ASTSource

    return int(_compiled(ASTSource, kernel, types, constants, warps, capability, until="layout").metadata.shared)


def swizzles(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> set[str]:
    """How wide what swizzles its blocks in shared memory is, on Hopper."""
    from triton.compiler import ASTSource

    made = _compiled(ASTSource, kernel, types, constants, warps, 90, until="ttgir")
    return set(re.findall(r"swizzlingByteWidth = \d+", made.asm["ttgir"]))


def check_for_hopper(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, beside: int = 1, **options: Any
) -> str:  # fmt: skip
    """A kernel in Gluon fits, and its products run beside one another: where the assembler cannot show that no register
    of one under way is written, it lets every product wait for the one before, and says so in a log that nobody sees.

    Args:
        beside: programs that a multiprocessor is to hold at a time.

    Returns its instructions."""
    from triton.experimental.gluon._runtime import GluonASTSource

    made = _compiled(GluonASTSource, kernel, types, constants, warps, 90, **options)
    assert made.metadata.shared <= HOPPER_SHARED // beside - RESERVED
    threads = int(re.search(r"\.reqntid (\d+)", made.asm["ptx"])[1])  # type: ignore[index]
    registers = int(re.search(r"\.maxnreg (\d+)", made.asm["ptx"])[1])  # type: ignore[index]
    assert beside * threads * registers <= REGISTERS
    code = listing(made)
    assert 0 < 2 * code.count("WARPGROUP.DEPBAR") < code.count("HGMMA")
    return code


def listing(made: Any) -> str:
    """A kernel's instructions, by the disassembler itself: of long code Triton's own listing lacks the end, and
    `cuobjdump` takes twice as long."""
    with NamedTemporaryFile(suffix=".bin") as file:
        file.write(code_of(made.asm["cubin"]))
        file.flush()
        architecture = f"SM{made.metadata.target.arch}{'a' * (made.metadata.target.arch == 90)}"
        command = [triton.knobs.nvidia.nvdisasm.path, "--binary", architecture, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def code_of(cubin: bytes) -> bytes:
    """What the one section for instructions holds, of an ELF file of 64 bits."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<3H", cubin, 0x3A)
    sections = [struct.unpack_from("<2I4Q", cubin, headers + i * size) for i in range(count)]
    names = sections[of_names][4]
    (code,) = [
        cubin[start : start + length]
        for name, _, _, _, start, length in sections
        if cubin.startswith(b".text.", names + name)
    ]
    return code


def _compiled(
    make_source: Any,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    capability: int,
    until: str = "cubin",
    **options: Any,
) -> Any:
    """By all stages of the compiler, or none behind one that says what is asked for."""
    from triton.backends.compiler import GPUTarget

    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else {**POINTERS, **types}.get(n, "i32") for n in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    whole = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
             if signature[n].startswith("*") or n in ALIGNED}  # fmt: skip
    source = make_source(kernel, signature, values, whole)

    def stop(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str]:
        last = "llir" if until == "layout" else until
        for stage in [*stages][[*stages].index(last) + 1 :] if stages else ():
            stages[stage] = lambda module, metadata: metadata.update({"name": "", "shared": None} | metadata) or b""
        if stages and until == "layout":
            stages["llir"] = functools.partial(_lay_out, stages["llir"])
        return until, until  # what is kept is kept by

    with triton.knobs.runtime.scope():
        triton.knobs.runtime.add_stages_inspection_hook = stop
        options["num_warps"] = warps
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


class _AllLaidOut(Exception):
    """The passes up to the one that makes LLVM's code of it."""


def _lay_out(make_llir: Any, module: Any, metadata: dict[str, Any]) -> bytes:
    """What the compiler does to a module before LLVM's code is made of it, which takes longer: its shared memory is
    counted by then."""
    from triton.backends.nvidia.compiler import CUDABackend

    def reached(point: str, passes: Any, context: Any) -> None:
        raise _AllLaidOut(passes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CUDABackend, "instrumentation", SimpleNamespace(patch=reached, load_dialects=lambda *_: None))
        with pytest.raises(_AllLaidOut) as laid_out:
            make_llir(module, metadata)
    laid_out.value.args[0].run(module, "layout")
    metadata["shared"] = module.get_int_attr("ttg.shared")
    return b""


def constants_of(spec: AttentionSpec, page_size: int, **tile: int) -> dict[str, Any]:
    dims = {"DIM": spec.head_dim, "DIM_VO": spec.head_dim_vo}
    dims |= zip(("BLOCK_DIM", "BLOCK_DIM_VO"), tuning.block_dims(spec), strict=True)
    return {"SOFT_CAP": 0, "ALIBI": 0, "SCALE_FIRST": 0, "ALIKE": 0, "PAGE_SIZE": page_size,
            "KV_HEADS": spec.num_kv_heads, "GROUP": spec.group_size, "EXACT": int(spec.dtype is torch.float32),
            **dims, **tile}  # fmt: skip


def prefill_of(spec: AttentionSpec, page_size: int, room: int) -> tuple[Any, dict[str, Any]]:
    """The tile, and the kernel's constants; a page size of 0 stands for prompts."""
    tile = tuning.prefill_tile(spec, KVCacheSpec(16, 16), None, room, "prefill" if page_size else "prompt")
    sizes = {
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "STAGES": tile.stages,
        "LOCAL": 1,
        "SPLIT": 1,  # which keeps what a tile that is whole has no use for
        "ONE_BLOCK": 0,
        "USE_PDL": 0,
    }
    return tile, constants_of(spec, page_size, **sizes)


def decode_of(
    spec: AttentionSpec, num_rows: int, query_rows: int, room: int, given: Any = None
) -> tuple[Any, dict[str, Any]]:
    """The tile, `given` or the one that is chosen, and the kernel's constants, for one tile of queries."""
    launch = pytest.importorskip("attn_backends.backends.triton.launch")
    schedule = pytest.importorskip("attn_backends.backends.triton.schedule")
    tile = given or tuning.decode_tile(spec, KVCacheSpec(16, 16), num_rows, query_rows, None, room)
    dims = launch.BlockDims(spec.head_dim, spec.head_dim_vo, *tuning.block_dims(spec))
    plan, is_exact = schedule.SplitPlan(1, query_rows, query_rows), spec.dtype is torch.float32
    has_pairs = int(spec.cache_dtype.itemsize == 1)
    pdl = Pdl.WAIT_AT_ONCE if room == HOPPER else Pdl.OFF
    constants = launch._decode_constants((0, 0, 0), 0, has_pairs, 16, spec.num_kv_heads, spec.group_size, plan, tile,
                                         dims, False, is_exact, schedule.has_one_loop(spec, plan),
                                         schedule.short_blocks(spec, tile, plan), pdl)  # fmt: skip
    return tile, constants._asdict()


def tensors_of(spec: AttentionSpec) -> dict[str, str]:
    name, cached = (f"*{TRITON_NAMES[dtype]}" for dtype in (spec.dtype, spec.cache_dtype))
    return {"query": name, "output": name, "key_cache": cached, "value_cache": cached}


@pytest.mark.parametrize(
    ("spec", "page_size", "capability", "room"),
    [
        (spec_of(128, 128, torch.bfloat16), 0, 90, HOPPER),
        (spec_of(256, 256, torch.bfloat16), 16, 90, HOPPER),
        (spec_of(192, 128, torch.bfloat16), 0, 90, HOPPER),
        (spec_of(256, 256, torch.bfloat16, torch.float8_e4m3fn), 16, 90, HOPPER),
        (spec_of(256, 256, torch.bfloat16), 0, 80, AMPERE),
        *((spec_of(128, 128, torch.float32), 16, *gpu) for gpu in ((90, HOPPER), (86, SMALL))),
        *((spec_of(128, 128, torch.float32, cached), 0, 90, HOPPER) for cached in (torch.float16, torch.float8_e5m2)),
        *((AttentionSpec(71, 1, dim, dtype=torch.float32), 0, 90, HOPPER) for dim in (64, 128)),
        (AttentionSpec(71, 1, 256, dtype=torch.bfloat16), 16, 86, SMALL),
        *(
            (AttentionSpec(71, 1, dim, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn), 16, *gpu)
            for dim in (64, 256)
            for gpu in ((90, HOPPER), (89, SMALL))
        ),
        (AttentionSpec(71, 1, 256, dtype=torch.bfloat16), 0, 86, SMALL),
    ],
    ids=str,
)
def test_prefill_fits_as_compiled(spec: AttentionSpec, page_size: int, capability: int, room: int) -> None:
    from attn_backends.kernels.prefill.portable_kernel import prefill_kernel

    tile, constants = prefill_of(spec, page_size, room)
    if page_size == 0:  # of the queries' dtype
        spec = replace(spec, cache_dtype=spec.dtype)
    types = tensors_of(spec)
    assert shared_bytes(prefill_kernel, types, constants | WITHOUT_DESCRIPTORS, tile.warps, capability) <= room
    if capability >= 90 and spec.cache_dtype is spec.dtype:
        blocks = {"key_desc": spec.head_dim, "value_desc": spec.head_dim_vo}
        name_of = TRITON_NAMES[spec.dtype]
        types |= {name: f"tensordesc<{name_of}[{tile.keys}, {fitting.padded(dim)}]>" for name, dim in blocks.items()}
        assert shared_bytes(prefill_kernel, types, constants, tile.warps, capability) <= room


@pytest.mark.parametrize(("dim", "dtype"), [(256, torch.bfloat16), (128, torch.float32)], ids=str)
def test_a_token_of_many_heads_is_held_in_registers(dim: int, dtype: torch.dtype) -> None:
    """Of 71 heads over 8 bits, whose tile was measured with half as many queries: 4 warps kept 900 numbers a thread in
    memory."""
    from triton.compiler import ASTSource

    from attn_backends.kernels.prefill.portable_kernel import prefill_kernel

    spec = AttentionSpec(71, 1, dim, dtype=dtype, cache_dtype=torch.float8_e4m3fn)
    tile, constants = prefill_of(spec, 16, HOPPER)
    made = _compiled(ASTSource, prefill_kernel, tensors_of(spec), constants | WITHOUT_DESCRIPTORS, tile.warps, 90)
    assert made.metadata.shared <= HOPPER
    assert listing(made).count("LDL") < 150


@pytest.mark.parametrize("page_size", [16, 0])
@pytest.mark.parametrize("dims", [(256, 16), (64, 32), (32, 16), (16, 128)], ids=str)
def test_keys_and_values_lie_in_shared_memory_alike(dims: tuple[int, int], page_size: int) -> None:
    """See `block_dims`."""
    from attn_backends.kernels.prefill.portable_kernel import prefill_kernel

    spec = spec_of(*dims, torch.bfloat16)
    tile, constants = prefill_of(spec, page_size, HOPPER)
    assert len(swizzles(prefill_kernel, tensors_of(spec), constants | WITHOUT_DESCRIPTORS, tile.warps)) == 1


@pytest.mark.parametrize("cached", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("dim", "group"), [(16, 4), (48, 12), (64, 8), (128, 4)])
def test_keys_and_values_of_float32_lie_alike(dim: int, group: int, cached: torch.dtype) -> None:
    """See `block_dims`. Groups of 12 heads of 48 over bfloat16 had blocks of 16 keys: an illegal access on an H200."""
    from attn_backends.backends.triton.kernels.decode import decode_kernel

    spec = AttentionSpec(group, 1, dim, dtype=torch.float32, cache_dtype=cached)
    tile, constants = decode_of(spec, 5, 64, HOPPER)
    assert swizzles(decode_kernel, tensors_of(spec), constants, tile.warps) == {"swizzlingByteWidth = 128"}


@pytest.mark.parametrize("given", [None, tuning.DecodeTile(64, 4, 6, 1, 128)], ids=["table", "large"])
@pytest.mark.parametrize("dim", [32, 64, 80])
def test_keys_and_values_of_8_bits_lie_alike(dim: int, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """See `block_dims`: values are two halves. Those of 64, in products of Hopper's matrix units beside keys twice as
    wide, were an illegal access on an H200; whatever the table says, they go by others."""
    from attn_backends.backends.triton.kernels.decode import decode_kernel

    if given is not None:
        monkeypatch.setattr(tuning, "_nearest", lambda *_: vars(given))
    spec = AttentionSpec(48, 4, dim, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn)
    tile, constants = decode_of(spec, 217, 64, HOPPER)
    assert swizzles(decode_kernel, tensors_of(spec), constants, tile.warps) <= {"swizzlingByteWidth = 128"}


def test_blocks_of_float32_hold_32_keys_wherever_hopper_has_room() -> None:
    for dim in range(16, 129, 16):
        for cached in (torch.float32, torch.bfloat16, torch.float8_e5m2):
            for group, page_size, num_rows in product((1, 4, 8, 12, 64), (1, 16, 64), (1, 16, 256)):
                spec = AttentionSpec(group, 1, dim, dtype=torch.float32, cache_dtype=cached)
                assert tuning.decode_tile(spec, KVCacheSpec(16, page_size), num_rows, 64, None, HOPPER).keys >= 32
                for kind in ("prefill", "prompt"):
                    assert tuning.prefill_tile(spec, KVCacheSpec(16, page_size), None, HOPPER, kind).keys >= 32


@pytest.mark.parametrize(
    ("spec", "capability", "room", "num_rows", "query_rows"),
    [
        *((spec_of(256, 256, torch.bfloat16), 90, HOPPER, num_rows, 16) for num_rows in (1, 64)),
        *((spec_of(dim, dim, torch.bfloat16), 90, HOPPER, 16, 64) for dim in (128, 256)),
        (spec_of(256, 256, torch.bfloat16), 86, SMALL, 1, 16),
        *((spec_of(128, 128, torch.float32), *gpu, 1, 64) for gpu in ((90, HOPPER), (86, SMALL))),
        (spec_of(256, 256, torch.bfloat16), 86, SMALL, 16, 64),
        *((spec_of(256, 256, torch.bfloat16, torch.float8_e4m3fn), 90, HOPPER, 16, rows) for rows in (16, 64)),
        (spec_of(128, 128, torch.bfloat16, torch.float8_e5m2), 89, SMALL, 16, 16),
    ],
    ids=str,
)
def test_decode_fits_as_compiled(
    spec: AttentionSpec, capability: int, room: int, num_rows: int, query_rows: int
) -> None:
    from attn_backends.backends.triton.kernels.decode import decode_kernel

    tile, constants = decode_of(spec, num_rows, query_rows, room)
    assert shared_bytes(decode_kernel, tensors_of(spec), constants, tile.warps, capability) <= room


@pytest.mark.parametrize("cached", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_decodes_of_one_dtype_over_another_compile(dtype: torch.dtype, cached: torch.dtype) -> None:
    """Queries of 16 bits over a cache of 32 ended the process: instructions that keep 16 bits where they are had two
    results of 32."""
    from triton.compiler import ASTSource

    from attn_backends.backends.triton.kernels.decode import decode_kernel

    spec = spec_of(64, 64, dtype, cached)
    tile, constants = decode_of(spec, 1, 16, HOPPER)
    assert _compiled(ASTSource, decode_kernel, tensors_of(spec), constants, tile.warps, 90, until="llir").asm["llir"]


@pytest.mark.parametrize("cached", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_an_fp8_cache_costs_no_slow_instructions(cached: torch.dtype) -> None:
    """See `kernels.fp8`: one of 16 bits at a time, and loads of single bytes."""
    from triton.compiler import ASTSource

    from attn_backends.backends.mla.triton_mla.decode_kernel import mla_decode_kernel
    from attn_backends.backends.triton.kernels.decode import decode_kernel

    spec, latent = spec_of(128, 128, torch.bfloat16, cached), MLASpec(16, dtype=torch.bfloat16, cache_dtype=cached)
    decodes = {warps: decode_of(spec, 64, 16, HOPPER, tuning.DecodeTile(64, warps, 3, 4, 128))[1] for warps in (1, 4)}
    mla = {"WANT_LSE": 0, "PAGE_SIZE": 16, "QUERY_LEN": 1, "HEADS": 16, "TILES": 1, "BLOCK_M": 16, "BLOCK_N": 32,
           "RANK": 512, "ROPE": 64, "BLOCK_RANK": 512, "BLOCK_ROPE": 64, "EXACT": 0, "STAGES": 3, "latent_rows": None,
           "rope_rows": None, "USE_PDL": 1}  # fmt: skip
    latent_cache = f"*{TRITON_NAMES[latent.cache_dtype]}"
    for kernel, types, constants, warps in (
        *((decode_kernel, tensors_of(spec), decode, warps) for warps, decode in decodes.items()),
        (mla_decode_kernel, {"query": "*bf16", "output": "*bf16", "latent_cache": latent_cache}, mla, 4),
    ):
        code = listing(_compiled(ASTSource, kernel, types, constants, warps, 90))
        assert "HMMA" in code
        assert "F2F." not in code
        assert code.count("LDS.U8") <= 4  # by masks


@pytest.mark.parametrize("start", list(Pdl))
def test_decode_waits_as_it_starts(start: Any) -> None:
    """Early: before all loads but those of its item. Beside another kernel: last of all, and reads anew at first."""
    from triton.compiler import ASTSource

    from attn_backends.backends.triton.kernels.decode import decode_kernel

    spec = spec_of(128, 128, torch.bfloat16, torch.bfloat16)
    tile, constants = decode_of(spec, 64, 16, HOPPER)
    constants["PDL"] = int(start)
    code = listing(_compiled(ASTSource, decode_kernel, tensors_of(spec), constants, tile.warps, 90))
    before, waits, behind = code.partition("ACQBULK")
    if start is Pdl.OFF:
        assert not waits
    elif start is Pdl.WAIT_AT_ONCE:
        assert waits
        assert "LDG" not in before
    elif start is Pdl.WAIT_FIRST:
        assert waits
        assert before.count("LDG") <= 14  # an item, its page ids, and where more are
        assert "LDGSTS" not in before
    else:
        assert waits
        assert "LDG" not in code.partition("CCTL.IVALL")[0]
        behind = behind.partition("EXIT")[0]  # functions come then
        assert not any(access in behind for access in ("LDG", "STG", "LDS", "STS"))


def test_the_portable_prefill_waits_before_it_reads() -> None:
    from triton.compiler import ASTSource

    from attn_backends.kernels.prefill.portable_kernel import prefill_kernel

    spec = spec_of(64, 64, torch.bfloat16, torch.bfloat16)
    tile, constants = prefill_of(spec, 16, HOPPER)
    constants = constants | WITHOUT_DESCRIPTORS | {"USE_PDL": 1}
    code = listing(_compiled(ASTSource, prefill_kernel, tensors_of(spec), constants, tile.warps, 90))
    before, waits, _behind = code.partition("ACQBULK")
    assert waits
    assert "LDG" not in before


@pytest.mark.parametrize(
    ("dim", "rows", "keys", "warps", "is_8_bit"),
    [(256, 64, 32, 4, False), (256, 16, 128, 8, True), (128, 64, 64, 4, True), (128, 16, 128, 4, False),
     (64, 64, 128, 4, True), (128, 16, 64, 4, False), (64, 16, 64, 4, False)],
    ids=str,
)  # fmt: skip
def test_one_block_is_asked_for_at_once(dim: int, rows: int, keys: int, warps: int, is_8_bit: bool) -> None:
    """Keys, values and queries, before any of them is waited for: such a program does nothing but wait else. Compilers
    ask for values behind the first product, and scale queries in front of them."""
    from triton.compiler import ASTSource

    from attn_backends.kernels.prefill.portable_kernel import prefill_kernel

    spec = spec_of(dim, dim, torch.bfloat16, torch.float8_e4m3fn if is_8_bit else torch.bfloat16)
    tile = {"BLOCK_M": rows, "BLOCK_N": keys, "STAGES": 1}
    constants = prefill_of(spec, 16, HOPPER)[1] | WITHOUT_DESCRIPTORS | tile
    constants |= {"LOCAL": 0, "SPLIT": 0, "ONE_BLOCK": 1, "USE_PDL": 1, "ALIKE": 1}
    made = _compiled(ASTSource, prefill_kernel, tensors_of(spec), constants, warps, 90)
    code = listing(made)
    assert made.metadata.shared <= HOPPER
    assert code.count("LDL") < 16
    wide = [match.start() for match in re.finditer(r"LDG\.E\.128", code)]
    num_bytes = 2 * keys * dim * spec.cache_dtype.itemsize + rows * dim * spec.dtype.itemsize
    assert len(wide) == num_bytes // (16 * 32 * warps)
    between = code[wide[0] : wide[-1]]
    assert "STS.128" not in between
    assert "HMMA" not in between
    assert "HGMMA" not in between


ONE_TOKEN = {"NORM": 1, "RESIDUAL": 1, "GATED": 1, "BLOCK_N": 4, "BLOCK_K": 1024}
WRITE = {"PAGE_SIZE": 16, "HEADS": 8, "KEY_DIM": 128, "VALUE_DIM": 128, "KEY_BLOCK": 1024, "VALUE_BLOCK": 1024,
         "LIMIT": 0.0, "SCALED": 0, "LAUNCH_DEPENDENTS": 1}  # fmt: skip
ABSORB = {"NOPE": 128, "ROPE": 64, "RANK": 512, "BLOCK_T": 64, "BLOCK_NOPE": 128, "BLOCK_RANK": 128}
PROJECT = {"RANK": 512, "BLOCK_T": 64, "BLOCK_RANK": 128, "BLOCK_V": 64}


@pytest.mark.parametrize(
    ("module", "name", "constants", "reads"),
    [
        ("engine.models.fused.kernels", "rms_norm_kernel", {"BLOCK": 1024}, True),
        ("engine.models.fused.kernels", "rotate_kernel", {"DIM": 64, "HALF": 32}, False),
        ("engine.models.fused.kernels", "gate_kernel", {"BLOCK": 1024}, False),
        ("engine.models.fused.kernels", "one_token_kernel", ONE_TOKEN, True),
        ("cache.kernels", "write_kv_kernel", WRITE, False),
        ("backends.mla.absorption_triton", "absorb_kernel", ABSORB, True),
        ("backends.mla.absorption_triton", "up_project_kernel", PROJECT, False),
    ],
)
def test_kernels_that_start_early_wait_first(module: str, name: str, constants: dict[str, Any], reads: bool) -> None:
    """But for weights, if they read some; then they let the next one start."""
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"attn_backends.{module}"), name)
    numbers = {"size", "epsilon", "stride", "num_rows", "num_columns", "num_tokens", "k_scale", "v_scale"} | ALIGNED
    tensors = [n for n in kernel.arg_names if n.islower() and n not in numbers and not n.startswith(("key_", "value_"))]
    types = dict.fromkeys([*tensors, "key_cache", "value_cache"], "*bf16")
    types |= {"slot_mapping": "*i64"} | dict.fromkeys(("epsilon", "k_scale", "v_scale"), "fp32")
    code = listing(_compiled(ASTSource, kernel, types, constants | {"USE_PDL": 1}, 4, 90))
    before, waits, behind = code.partition("ACQBULK")
    assert waits
    assert ("LDG" in before) == reads
    assert "STG" not in before
    assert "PREEXIT" not in before
    assert "PREEXIT" in behind


def test_parts_of_latent_rows_are_read_behind_the_wait() -> None:
    """And its list before. All programs wait, those with nothing to join too: else what comes next may not find the
    decode done."""
    from triton.compiler import ASTSource

    from attn_backends.backends.mla.triton_mla.arguments import CombineColumns
    from attn_backends.backends.mla.triton_mla.decode_kernel import mla_combine_kernel

    constants = {"WANT_LSE": 0, "QUERIES": 128, "SLOT_QUERIES": 128, "RANK": 512, "BLOCK_RANK": 512, "USE_PDL": 1,
                 **CombineColumns.of(512)._asdict()}  # fmt: skip
    code = listing(_compiled(ASTSource, mla_combine_kernel, {"output": "*bf16"}, constants, 1, 90))
    before, waits, _ = code.partition("ACQBULK")
    assert waits
    assert before.count("LDG") <= 2 + 2 * 3  # where the other items are, and of two items what is wanted
    assert "EXIT" not in before


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("query_rows", [16, 64])
@pytest.mark.parametrize("dims", [(64, 64), pytest.param((80, 80), marks=pytest.mark.long), (128, 128),
                                  pytest.param((192, 128), marks=pytest.mark.long), (256, 256)], ids=str)  # fmt: skip
def test_decode_stays_in_registers(dims: tuple[int, int], query_rows: int, cached: torch.dtype) -> None:
    """But for a few numbers, most of them behind the products; and products of 64 rows are of Hopper's matrix units
    where four warps have them."""
    from triton.compiler import ASTSource

    from attn_backends.backends.triton.kernels.decode import decode_kernel

    spec = spec_of(*dims, torch.bfloat16, cached)
    tile, constants = decode_of(spec, 64, query_rows, HOPPER)
    made = _compiled(ASTSource, decode_kernel, tensors_of(spec), constants, tile.warps, 90)
    code = listing(made)
    assert ("HGMMA" in code) == (query_rows == 64 and tile.warps >= 4)
    lines = code.splitlines()
    products, kept = ([at for at, line in enumerate(lines) if name in line] for name in ("MMA", "LDL"))
    assert len(kept) < 160
    among = sum(products[0] < at < products[-1] for at in kept)
    assert among < (64 if query_rows * dims[0] > 128 * 64 else 40)


@pytest.mark.parametrize("warps", [1, 4])
def test_warps_agree_on_who_has_begun(warps: int) -> None:
    """One load for each thread of a program, of which all take the highest: warps that went apart would never meet."""
    from triton.compiler import ASTSource

    from attn_backends.backends.triton.kernels.decode import decode_kernel

    spec = spec_of(128, 128, torch.bfloat16)
    tile, constants = decode_of(spec, 1, 16, HOPPER, tuning.DecodeTile(32, warps, 6, 1, 128))
    made = _compiled(ASTSource, decode_kernel, tensors_of(spec), constants, tile.warps, 90)
    volatile = [line for line in made.asm["ttgir"].splitlines() if "tt.load" in line and "isVolatile = true" in line]
    loads = [line for line in volatile if "ptr<i32>" in line]
    num_functions = 2 if warps == 1 else 1  # of parts that are attended for at once, and of all else
    assert [f"tensor<{32 * warps}x!tt.ptr<i32>" in line for line in loads] == [True, False] * num_functions, loads


@pytest.mark.parametrize("heads", [(4, 1), (8, 1), (6, 2), (32, 8)], ids=str)
def test_the_highest_of_a_warp_is_under_no_predicate(heads: tuple[int, int]) -> None:
    """ptxas would write another number into it, by which nobody stays to combine splits: 70 us and not 9."""
    from triton.compiler import ASTSource

    from attn_backends.backends.triton.kernels.decode import decode_kernel

    spec = AttentionSpec(*heads, 128, dtype=torch.bfloat16)
    tile, constants = decode_of(spec, 1, 16, HOPPER)
    code = listing(_compiled(ASTSource, decode_kernel, tensors_of(spec), constants, tile.warps, 90))
    found = [line for line in code.splitlines() if "REDUX" in line]
    assert found
    assert not any("@" in line for line in found), found


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(("capability", "room"), [(90, HOPPER), (80, AMPERE)])
def test_latent_decode_fits_as_compiled(capability: int, room: int, heads: int) -> None:
    from attn_backends.backends.mla.triton_mla.decode_kernel import mla_decode_kernel

    tile = tiles.decode_tile(MLASpec(heads, dtype=torch.bfloat16), KVCacheSpec(16, 64), 64, heads, None, room)
    rows = min(fitting.padded(heads), tile.rows)
    constants = {"WANT_LSE": 0, "PAGE_SIZE": 64, "QUERY_LEN": 1, "HEADS": heads, "TILES": heads // rows,
                 "BLOCK_M": rows, "BLOCK_N": tile.keys, "RANK": 512, "ROPE": 64, "BLOCK_RANK": 512, "BLOCK_ROPE": 64,
                 "EXACT": 0, "STAGES": tile.stages, "USE_PDL": int(capability >= 90)}  # fmt: skip
    types = dict.fromkeys(("query", "latent_cache", "output"), "*bf16")
    if capability >= 90:
        blocks = {"latent_rows": 512, "rope_rows": 64}
        types |= {name: f"tensordesc<bf16[{tile.keys}, {width}]>" for name, width in blocks.items()}
    else:
        constants |= {"latent_rows": None, "rope_rows": None}
    assert shared_bytes(mla_decode_kernel, types, constants, tile.warps, capability) <= room


@pytest.mark.parametrize(
    ("query_len", "heads", "want_lse", "dtype", "page_size", "cached"),
    [(1, 128, 0, "bf16", 64, "of queries"), (4, 40, 1, "fp16", 16, "of queries"), (4, 16, 0, "bf16", 16, "of queries"),
     pytest.param(1, 128, 0, "bf16", 64, "e4m3", marks=pytest.mark.long), (4, 40, 1, "fp16", 16, "e4m3"),
     (1, 128, 0, "bf16", 64, "e5m2"), pytest.param(4, 40, 1, "fp16", 16, "e5m2", marks=pytest.mark.long)],
)  # fmt: skip
def test_the_latent_kernel_for_hopper_as_compiled(
    query_len: int, heads: int, want_lse: int, dtype: str, page_size: int, cached: str
) -> None:
    """Blocks of rows beside the queries."""
    from attn_backends.backends.mla.triton_mla import decode_hopper_kernel
    from attn_backends.kernels import hopper

    rows, pair, group = (
        decode_hopper_kernel.BLOCK_M.value,
        2 * decode_hopper_kernel.BLOCK_N.value,
        decode_hopper_kernel.GROUP_WARPS,
    )
    assert (rows, pair, 2 * group, 1) == tiles.HOPPER_TILE
    load = hopper.tma_rows(page_size, decode_hopper_kernel.BLOCK_N.value)
    constants = {"WANT_LSE": want_lse, "PAGE_SIZE": page_size, "TMA_ROWS": load, "QUERY_LEN": query_len, "HEADS": heads,
                 "TILES": -(-query_len * heads // 64), "UPCAST": int(cached != "of queries"),
                 "E5M2": int(cached == "e5m2"), "USE_PDL": 1}  # fmt: skip
    types = dict.fromkeys(("query", "output"), f"*{dtype}")
    types["cached"] = f"tensordesc<{dtype}[{load}, 64],{hopper.BLOCK_LAYOUT!r}>"
    if cached == "of queries":
        types["queries"] = f"tensordesc<{dtype}[{rows}, 1, 64],{hopper.HEAD_LAYOUT!r}>"
        types["last_rows"] = f"tensordesc<{dtype}[16, 64],{hopper.BLOCK_LAYOUT!r}>"
    else:
        types["cached"] = "*i32"
        constants |= {"queries": None, "last_rows": None}
    code = check_for_hopper(decode_hopper_kernel.mla_hopper_kernel, types, constants, group)
    found = [body for body in loops(code) if any("HGMMA" in line or "UTMALDG" in line for line in body)]
    assert len(found) >= 2
    assert not any("LDL" in line for body in found for line in body)  # decode took up to 1.3 times as long with them


@pytest.mark.parametrize(("capability", "room"), [(90, HOPPER), (80, AMPERE), (86, SMALL)])
@pytest.mark.parametrize(
    ("dims", "dtype"),
    [((128, 64, 128), torch.bfloat16), ((64, 32, 64), torch.bfloat16), ((192, 64, 256), torch.bfloat16),
     ((64, 32, 64), torch.float32)],
    ids=str,
)  # fmt: skip
def test_prefill_of_latent_layers_as_compiled(
    dims: tuple[int, int, int], dtype: torch.dtype, capability: int, room: int
) -> None:
    """By the portable kernel, over expanded keys: it fits, and stays in registers but for a few numbers. Products of
    float32, which are three, keep more in memory on Ampere."""
    from triton.compiler import ASTSource

    from attn_backends.kernels.prefill.portable_kernel import prefill_kernel
    from attn_backends.kernels.prefill.tiles import varlen_tile

    nope, rope, v_dim = dims
    spec = MLASpec(16, head_dim=nope + rope, qk_rope_head_dim=rope, head_dim_vo=v_dim, dtype=dtype)
    tile = varlen_tile(spec, room)
    sizes = {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "STAGES": tile.stages, "LOCAL": 0,
             "SPLIT": 0, "ONE_BLOCK": 0, "USE_PDL": int(capability >= 90)}  # fmt: skip
    constants = constants_of(spec, 0, **sizes) | WITHOUT_DESCRIPTORS
    made = _compiled(ASTSource, prefill_kernel, tensors_of(spec), constants, tile.warps, capability)
    assert made.metadata.shared <= room
    assert listing(made).count("LDL") < (256 if dtype is torch.float32 else 48)


def hopper_cases() -> Iterator[Any]:
    """Of a window the code has all loops that it has without one, so of most dims that is enough; a split list of tiles
    differs by what is read and written, not by dims. Dims of 96 lie between those of 80 and 112, in as many tiles. The
    other tiles are smaller, or of narrow heads."""
    others = {((64, 64), 16), ((112, 112), 16), ((128, 128), 0)}
    pages, prompts = [(dims, 16) for dims in launch.HOPPER_DIMS], [((128, 128), 0), ((192, 128), 0)]
    more = {(((dim, dim), 16), how) for dim in (128, 256) for how in ("all_keys", "split")}
    more |= {(prompts[1], "window"), (prompts[1], "split")}
    for case, how in product(pages + prompts, ("all_keys", "window", "split")):
        usual = how == ("all_keys" if case in prompts else "window") and case not in (((96, 96), 16), prompts[1])
        long = not usual and (case, how) not in more
        name = f"{'-'.join(map(str, case))}-{how}"
        yield pytest.param(*case, how, 0, id=name, marks=[pytest.mark.long] * long)
        for which, tile in [*enumerate(prefill_tiles.hopper_tiles(*case[0]))][1:]:
            if how == "split" and tile.groups != 1:
                continue
            marks = [pytest.mark.long] * (case not in others or (which == 2 and how == "window"))
            yield pytest.param(*case, how, which, id=f"{name}-other-{which}", marks=marks)


@pytest.mark.parametrize(("dims", "page_size", "how", "which"), list(hopper_cases()))
def test_the_prefill_kernel_for_hopper_as_compiled(dims: tuple[int, int], page_size: int, how: str, which: int) -> None:
    tile = prefill_tiles.hopper_tiles(*dims)[which]
    code = code_for_hopper(dims, page_size, how, tile)
    # The warp that takes tiles from a list keeps some numbers in memory, which no other waits for.
    assert tile.beside == 1 or code.count("LDL") <= 5 * (how == "split")
    checked = products_of(code)
    is_full = tile.groups > 2 or (tile.groups == 2 and dims[0] > 128)  # a few numbers of its loops are in memory
    assert is_full or not any("LDL" in each for body in checked for each in body)


def hopper_cases_of_8_bits() -> Iterator[Any]:
    """Of a window the code has all loops that it has without one: where time does not matter all tiles have it."""
    usual = [((128, 128), "all_keys", 0, 1), ((128, 128), "split", 1, 0), ((256, 256), "all_keys", 0, 0)]
    others = [(dims, "window", which, int(dims[0] == 96)) for dims in launch.HOPPER_DIMS
              for which in range(len(prefill_tiles.hopper_tiles(*dims, True)))]  # fmt: skip
    others += [((dim, dim), "split", 0, 0) for dim in (64, 192, 256)]
    for dims, how, which, e5m2 in [*usual, *others]:
        marks = [pytest.mark.long] * ((dims, how, which, e5m2) in others)
        name = f"{dims[0]}-{dims[1]}-{how}-{which}-{'e5m2' if e5m2 else 'e4m3'}"
        yield pytest.param(dims, how, which, e5m2, id=name, marks=marks)


@pytest.mark.parametrize(("dims", "how", "which", "e5m2"), list(hopper_cases_of_8_bits()))
def test_the_prefill_kernel_for_hopper_over_8_bits_as_compiled(
    dims: tuple[int, int], how: str, which: int, e5m2: int
) -> None:
    """Four warps make float16 of both kinds, by instructions that take no longer than others."""
    code = code_for_hopper(dims, 16, how, prefill_tiles.hopper_tiles(*dims, True)[which], e5m2)
    assert "F2F." not in code
    assert not any("LDL" in each for body in products_of(code) for each in body)


def code_for_hopper(dims: tuple[int, int], page_size: int, how: str, tile: Any, e5m2: int = 0) -> str:
    from attn_backends.kernels import hopper
    from attn_backends.kernels.prefill import hopper_kernel
    from attn_backends.kernels.split_kv import FAR

    rows = hopper.tma_rows(page_size, tile.keys)
    constants = {"CHUNK": FAR.value, "LOCAL": 2 * (how == "window"), "PAGE_SIZE": page_size, "TMA_ROWS": rows,
                 "KV_HEADS": 2, "GROUP": 5, "BLOCK_N": tile.keys, "DIM": dims[0],
                 "DIM_VO": dims[1], "GROUPS": tile.groups, "IN_TURNS": int(tile.in_turns),
                 "K_STAGES": tile.stages, "V_STAGES": tile.blocks_of_values,
                 "Q_STAGES": tile.q_stages, "USE_PDL": 1, "LAUNCH_DEPENDENTS": 1,
                 "SPLIT": int(how == "split"), "RAW_STAGES": tile.raw_stages, "E5M2": e5m2}  # fmt: skip
    types, columns = dict.fromkeys(("query", "output"), "*bf16"), 2 if tile.raw_stages else 1
    types |= {f"{name}_desc": tiles_of(dim // columns, rows) for name, dim in zip(("key", "value"), dims, strict=True)}
    return check_for_hopper(
        hopper_kernel.prefill_hopper_kernel, types, constants, hopper_kernel.GROUP_WARPS, tile.beside,
        maxnreg=tile.most_registers,
    )  # fmt: skip


def products_of(code: str) -> list[list[str]]:
    """The loops with products, each checked."""
    checked = [body for body in loops(code) if any("HGMMA" in each for each in body)]
    assert checked
    for body in checked:  # weights are worked out while products with values are under way
        waits, weights = ([at for at, each in enumerate(body) if what in each] for what in ("DEPBAR", "MUFU.EX2"))
        assert len(waits) == 2
        assert waits[0] < weights[0]
        assert weights[-1] < waits[1]
    return checked


def loops(code: str) -> Iterator[list[str]]:
    """Instructions of each loop without another in it, but for those that wait."""
    lines = [(int(found[1], 16), found[2]) for found in re.finditer(r"/\*([0-9a-f]+)\*/ +([^;]*);", code)]
    targets = [(re.match(r"@\S+ BRA\S* +(0x[0-9a-f]+)", text), at) for at, text in lines]
    long = [(begin, at) for target, at in targets if target and (begin := int(target[1], 16)) < at - 0x200]
    for begin, end in long:
        if not any((begin, end) != other and begin <= other[0] and other[1] <= end for other in long):
            yield [text for at, text in lines if begin <= at <= end]


@pytest.mark.parametrize("dim_vo", [64, 128, 256])
def test_joins_of_splits_stay_in_registers(dim_vo: int) -> None:
    from triton.compiler import ASTSource

    from attn_backends.kernels.prefill import split_kernels, split_launch

    splits = split_launch.JoinConstants(
        KV_HEADS=3, GROUP=5, BLOCK_M=128, DIM_VO=dim_vo, BLOCK_DIM_VO=dim_vo,
        QUERIES=split_launch.JOIN_QUERIES, BLOCK_SPLITS=split_launch.splits_at_a_time(dim_vo),
        COLUMNS=split_launch.JOIN_COLUMNS, PDL=1,
    )  # fmt: skip
    types, warps = {"output": "*bf16"}, split_launch.JOIN_WARPS
    made = _compiled(ASTSource, split_kernels.join_kernel, types, splits._asdict(), warps, 90)
    assert made.metadata.shared <= 4 << 10
    assert "LDL" not in listing(made)


@pytest.mark.parametrize("kind", [{}, {"is_mixed": True}, {"by_length": True}], ids=str)
@pytest.mark.parametrize("num_rows", [1, 100])
def test_lists_of_tiles_stay_in_registers(num_rows: int, kind: dict[str, bool]) -> None:
    from triton.compiler import ASTSource

    from attn_backends.kernels.prefill import list_kernel, split_launch

    constants, warps = split_launch.list_form(num_rows, **{"is_mixed": False} | kind)
    made = _compiled(ASTSource, list_kernel.list_kernel, {}, constants._asdict(), warps, 90)
    assert "LDL" not in listing(made)


def tiles_of(dim: int, rows: int) -> str:
    """The type of a descriptor of TMA tiles: of one head among others, where they hold more columns than it has."""
    from attn_backends.kernels import hopper

    block, layout = ((rows, 1, 64), hopper.HEAD_LAYOUT) if dim % 64 else ((rows, 64), hopper.BLOCK_LAYOUT)
    return f"tensordesc<bf16{list(block)},{layout!r}>"


def test_what_was_tuned_on_hopper_stays_as_it_was_there() -> None:
    of_bits = {8: torch.float8_e4m3fn, 16: torch.bfloat16, 32: torch.float32}
    table = json.loads((BACKENDS / "triton" / "tuned.json").read_text())
    for kind, rows in table.items():
        for row in rows:
            if kind == "decode" and row["queries"] == 16 and row["bits"] < 32:
                continue  # few queries go by a rule; what was tuned for them in 8 bits is the nearest for more
            dtype = of_bits[max(16, row["bits"])]
            spec = AttentionSpec(2 * row["group"], 2, row["head_dim"], dtype=dtype, cache_dtype=of_bits[row["bits"]])
            cache, asked = KVCacheSpec(16, row["page_size"]), (None, HOPPER)
            got = (tuning.decode_tile(spec, cache, row["rows"], row["queries"], *asked) if kind == "decode"
                   else tuning.prefill_tile(spec, cache, *asked, kind))  # fmt: skip
            changed = {"joined"}  # which the table has not
            if row["bits"] == 32:  # tuned before its products were three
                changed |= {"warps", "programs"}
            assert {k: v for k, v in vars(got).items() if k not in changed} == {
                k: v for k, v in row["tile"].items() if k not in changed
            }, row
    for row in json.loads((BACKENDS / "mla" / "triton_mla" / "tuned.json").read_text())["decode"]:
        mla = MLASpec(row["queries"], dtype=of_bits[row["bits"]], cache_dtype=of_bits[row["cache_bits"]])
        cache = KVCacheSpec(16, row["page_size"])
        of_layer = (mla, cache, row["rows"], row["queries"], None, HOPPER)
        tile = tiles.LatentTile(**row["tile"])
        assert tiles.decode_tile(*of_layer, tile.hopper) == tile, row


def on_machine(changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A Hopper GPU and its Triton, unless `changed` has others; what it has of a layer, in 16 bits unless it says."""
    asked = {"capability": (9, 0), "triton": (3, 6), "dtype": torch.bfloat16, **changed}
    capability = asked.pop("capability")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(launching, "_capability", lambda gpu: capability)
    monkeypatch.setattr(launching, "_gpu", lambda device: device)
    monkeypatch.setattr(launching, "_TRITON", asked.pop("triton"))
    return asked


@pytest.mark.parametrize(
    ("changed", "serves"),
    [
        ({}, True),
        ({"page_size": 16}, True),
        ({"page_size": 8}, False),
        ({"cache_dtype": torch.float8_e4m3fn}, True),
        ({"dtype": torch.float32}, False),
        ({"dtype": torch.float32, "cache_dtype": torch.float8_e5m2}, False),
        ({"kv_lora_rank": 256}, False),
        ({"scale": -1.0}, False),
        ({"capability": (8, 0)}, False),
        ({"capability": (10, 0)}, False),
        ({"triton": (9, 9)}, False),
    ],
    ids=str,
)
def test_whom_the_kernel_for_hopper_serves(
    changed: dict[str, Any], serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attn_backends.backends.mla.triton_mla import launch as triton_mla

    asked = on_machine(changed, monkeypatch)
    cache = KVCacheSpec(16, asked.pop("page_size", 64))
    spec = MLASpec(128, **asked)
    assert triton_mla.suits_hopper_kernel(spec, cache, torch.device("cuda")) is serves
    assert not triton_mla.suits_hopper_kernel(spec, cache, torch.device("cpu"))
    tile = tiles.decode_tile(spec, cache, 64, 128, None, HOPPER, serves)
    assert (tile.hopper, tiles.SplitPlan(tile, 64, 40, 132).tile_rows) == (serves, 64 if serves else min(64, tile.rows))


@pytest.mark.parametrize("name", ["TRITON", "TRITON_MLA"])
def test_an_untried_triton_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the reason of the choice; not where no kernel for Hopper would serve anyway."""
    from attn_backends import get_backend

    note = get_backend(name).note
    on_machine({}, monkeypatch)
    assert note("cuda") == note("cpu") == ""
    on_machine({"triton": (9, 9)}, monkeypatch)
    assert f"Triton {triton.__version__} was not tried with the kernels for Hopper (3.6, 3.7 were)" in note("cuda")
    assert note("cpu") == ""
    on_machine({"triton": (9, 9), "capability": (8, 0)}, monkeypatch)
    assert note("cuda") == ""


def test_a_tile_for_hopper_where_its_kernel_cannot_serve() -> None:
    sizes = dict(zip(("rows", "keys", "warps", "stages"), tiles.HOPPER_TILE, strict=True))
    options = tiles.TritonMLAOptions(decode_tile={**sizes, "programs": 1, "min_keys": 128, "hopper": True})
    with pytest.raises(ValueError, match=r"pages of 8: leave `hopper` out"):
        tiles.decode_tile(MLASpec(16), KVCacheSpec(16, 8), 1, 16, options, HOPPER)
    with pytest.raises(ValueError, match=r"takes \(64, 128, 8, 1\); give these"):
        tiles.LatentTile(64, 64, 8, 3, 1, 128, hopper=True)


@pytest.mark.parametrize(
    ("changed", "serves"),
    [
        ({}, True),
        ({"window_left": 5}, True),
        ({"sinks": True}, True),
        ({"head_dim": 192, "head_dim_vo": 128}, True),
        ({"head_dim": 192}, True),
        ({"head_dim": 80}, True),
        ({"head_dim": 72}, False),
        ({"dtype": torch.float32}, False),
        ({"cache_dtype": torch.float8_e4m3fn}, True),
        ({"cache_dtype": torch.float16}, False),
        ({"cache_dtype": torch.float8_e5m2, "dtype": torch.float32}, False),
        ({"cache_dtype": torch.float8_e5m2, "head_dim": 256, "num_qo_heads": 64, "num_kv_heads": 1}, True),
        ({"cache_dtype": torch.float8_e5m2, "head_dim": 256, "num_qo_heads": 65, "num_kv_heads": 1}, False),
        ({"logits_soft_cap": 20.0}, False),
        ({"alibi_slopes": (0.5,) * 8}, False),
        ({"scale": -1.0}, False),
        ({"capability": (8, 0)}, False),
        ({"triton": (9, 9)}, False),
    ],
    ids=str,
)
def test_whom_the_prefill_kernel_for_hopper_serves(
    changed: dict[str, Any], serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    spec = AttentionSpec(**{**heads, **on_machine(changed, monkeypatch)})
    assert launch.suits_hopper_kernel(spec, torch.device("cuda")) is serves
    assert not launch.suits_hopper_kernel(spec, torch.device("cpu"))


@pytest.mark.parametrize("room", [HOPPER, AMPERE, SMALL])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [16, 80, 128, 192, 256])
def test_every_head_dim_gets_a_tile(dim: int, dtype: torch.dtype, room: int) -> None:
    spec, cache = spec_of(dim, dim, dtype), KVCacheSpec(16, 16)
    prefill = tuning.prefill_tile(spec, cache, None, room)
    width = 2 * fitting.padded(dim) * dtype.itemsize
    assert prefill.rows * width // 2 + prefill.keys * prefill.stages * width <= room
    assert prefill.keys >= 16
    assert tuning.decode_tile(spec, cache, 8, 16, None, room).keys >= 16


def test_a_tile_that_nothing_helps_is_as_small_as_can_be() -> None:
    smallest = fitting.fitted(tuning.PrefillTile(128, 128, 8, 3), lambda tile: 1 << 30, 1)
    assert (smallest.rows, smallest.keys, smallest.stages) == (16, 16, 1)
    asked = tuning.TritonOptions(prefill_tile={"rows": 128, "keys": 128, "warps": 8, "stages": 9})
    assert tuning.prefill_tile(spec_of(256, 256, torch.float32), KVCacheSpec(16, 16), asked, 1) == asked.prefill_tile


@pytest.mark.parametrize(
    ("dims", "dtype", "refused"),
    [((128, 128), torch.float32, False), ((144, 128), torch.float32, True), ((64, 240), torch.float32, True),
     ((256, 256), torch.bfloat16, False)],
    ids=str,
)  # fmt: skip
def test_float32_is_refused_where_registers_do_not_hold_it(
    dims: tuple[int, int], dtype: torch.dtype, refused: bool
) -> None:
    from attn_backends import get_backend

    triton = get_backend("TRITON")
    spec, cache = AttentionSpec(8, 2, dims[0], head_dim_vo=dims[1], dtype=dtype), KVCacheSpec(16, 16)
    found = [str(rejection) for rejection in triton.reject(spec, cache, "cuda") if rejection.code == "head_dim"]
    text = f"got {max(dims)} in torch.float32; supported: torch.float32 at head dims up to 128, 16 bits up to 256."
    assert found == [f"head_dim: {text} Use bfloat16 or float16, or TORCH."] * refused
    if refused:
        assert not [rejection for rejection in triton.reject(spec, cache, "cpu") if rejection.code == "head_dim"]


def test_fp8_is_refused_where_no_instruction_converts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_backends import get_backend

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    specs = {
        "TRITON": spec_of(64, 64, torch.bfloat16, torch.float8_e4m3fn),
        "TRITON_MLA": MLASpec(16, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn),
    }
    for name, spec in specs.items():
        for capability, refused in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, is_=capability: is_)
            found = get_backend(name).reject(spec, KVCacheSpec(16, 16), "cuda")
            assert [rejection.code for rejection in found] == ["cache_dtype"] * refused, found
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        told = str(get_backend(name).reject(spec, KVCacheSpec(16, 16), "cuda")[0])
        assert "float8_e4m3fn on compute capability 8.0; supported: fp8 from 8.9 on. Leave cache.dtype out." in told
