"""AUTO's order from what was measured: writes attn_backends/registry/measured.json.

    python -m benchmarks tune rank_backends

It reads the decode shapes of results/attention_all.json and results/mla_attention.json, and of other GPUs what
`MEASURED` names; of MLA whole layers, as products before one kernel can take longer than before another. Of a backend
with several providers the fastest counts. Then it prints what AUTO takes on the first of these GPUs at every shape of
both, from pages of any size, of 16 and of 64, and how long that takes beside the fastest backend that serves such
pages, and beside the fastest of all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attn_backends import AttentionSpec, KVCacheSpec, MLASpec, plan_groups
from attn_backends.interface.capabilities import mismatches
from attn_backends.registry.measured import Load, __file__ as measured_file, fastest_first, nearest
from attn_backends.registry.table import BackendEntry, backends, get_class
from benchmarks.attention import attention, mla_attention
from benchmarks.attention.mla_problem import MLAShape
from benchmarks.lib.harness import RESULTS, print_table

TABLE = measured_file.replace(".py", ".json")
PLAIN = {"TRITON", "FLASHINFER", "FLASH_ATTN"}
# Results of each GPU, of MLA too where there are.
MEASURED = (("attention_all", "mla_attention"), ("attention_h100", "mla_attention_h100"))
LATENT = {"TRITON_MLA", "FLASHINFER_MLA", "FLASH_ATTN_MLA", "FLASHMLA"}


def times(result: dict[str, Any], shape: str, column: str, names: set[str]) -> dict[str, float]:
    """Of the backends, the fastest first."""
    found: dict[str, float] = {}
    for row in result["rows"]:
        name = row["contender"].partition(":")[0].partition(",")[0]
        if row["shape"] == shape and name in names:
            found[name] = min(round(row[column], 1), found.get(name, float("inf")))
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def results(names: Sequence[str] = MEASURED[0]) -> list[dict[str, Any]]:
    return [json.loads((RESULTS / f"{name}.json").read_text()) for name in names]


def table() -> dict[str, Any]:
    """By GPU the dates and the rows of the table."""
    return dict(of_gpu(*results(names)) for names in MEASURED)


def of_gpu(plain: dict[str, Any], mla: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """The GPU that was measured, with the dates and the rows of its part of the table."""
    gpus, dates = ({result[name] for result in (plain, mla) if result is not None} for name in ("gpu", "date"))
    if len(gpus) > 1:
        raise SystemExit(f"the results are of different GPUs: {', '.join(sorted(gpus))}; run both benchmarks on one")
    made = []
    for shape in attention.SHAPES["decode"]:
        us = times(plain, shape.name, "us", PLAIN)
        made.append({"is_mla": False, "heads": shape.heads, "load": [len(shape.seq_lens), shape.seq_lens[0]], "us": us})
    for latent in mla_attention.SHAPES["decode"] if mla is not None else ():
        us = times(mla, latent.name, "layer us", LATENT)
        made.append(
            {"is_mla": True, "heads": latent.heads, "load": [len(latent.seq_lens), latent.seq_lens[0]], "us": us}
        )
    return gpus.pop(), {"dates": " and ".join(sorted(dates)), "rows": [row for row in made if row["us"]]}


def choices() -> list[dict[str, Any]]:
    """What AUTO takes by the shipped table, where all of these can be imported, and its time over the fastest ones'."""
    plain, mla = results()
    made, gpu = [], plain["gpu"]
    for shape in [*attention.SHAPES["decode"], *mla_attention.SHAPES["decode"], *mla_attention.SHAPES["verify"]]:
        is_mla = isinstance(shape, MLAShape)
        us = times(mla, shape.name, "layer us", LATENT) if is_mla else times(plain, shape.name, "us", PLAIN)
        spec = MLASpec(shape.heads[0]) if is_mla else AttentionSpec(*shape.heads)
        found = nearest(plan_groups({0: spec}), Load(len(shape.seq_lens), shape.seq_lens[0]), gpu)
        entries = fastest_first((backends[name] for name in us), found)
        for page_size in (None, 16, 64):
            serving = [entry.name for entry in entries if serves_pages_of(page_size, entry, spec)]
            taken = us[serving[0]]
            made.append({"shape": shape.name, "page size": page_size or "any", "AUTO": serving[0], "us": taken,
                         "vs fastest there": taken / min(us[name] for name in serving),
                         "vs fastest": taken / min(us.values())})  # fmt: skip
    return made


def serves_pages_of(page_size: int | None, entry: BackendEntry, spec: AttentionSpec) -> bool:
    if page_size is None:  # each backend has its own
        return True
    can, cache = get_class(entry).capabilities(), KVCacheSpec(1, page_size)
    return all(found.code != "page_size" for found in mismatches(can, spec, cache, torch.device("cuda")))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    made = table()
    lines = (f"  {json.dumps(gpu)}: {json.dumps(of)}".replace('{"is_mla"', '\n    {"is_mla"')
             for gpu, of in made.items())  # fmt: skip
    Path(TABLE).write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for gpu, of in made.items():
        print(f"{len(of['rows'])} shapes, measured on {gpu}, written to {TABLE}")
    print_table("what AUTO takes", choices())


if __name__ == "__main__":
    main()
