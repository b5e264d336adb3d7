"""AUTO's order from what was measured: writes attn_backends/measured.json.

    python benchmarks/rank_backends.py

It reads the decode shapes of results/attention_all.json and results/mla_attention.json; of the latter whole layers, as
products before one kernel can take longer than before another. Of a backend with several providers the fastest counts.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import attention
import mla_attention
from harness import RESULTS

from attn_backends.measured import __file__ as measured_file

TABLE = measured_file.replace(".py", ".json")


def times(result: dict[str, Any], shape: str, column: str, names: set[str]) -> dict[str, float]:
    """Of the backends, the fastest first."""
    found: dict[str, float] = {}
    for row in result["rows"]:
        name = row["contender"].partition(":")[0].partition(",")[0]
        if row["shape"] == shape and name in names:
            found[name] = min(round(row[column], 1), found.get(name, float("inf")))
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def rows() -> tuple[list[dict[str, Any]], str]:
    """Rows of the table, and where they were measured."""
    plain, mla = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("attention_all", "mla_attention"))
    where = {f"{result['gpu']} ({result['date']})" for result in (plain, mla)}
    if len(where) > 1:
        raise SystemExit(f"the results are of different days or GPUs: {sorted(where)}; run both benchmarks again")
    made = []
    for shape in attention.SHAPES["decode"]:
        us = times(plain, shape.name, "us", {"TRITON", "FLASHINFER", "FLASH_ATTN"})
        made.append({"is_mla": False, "heads": shape.heads, "load": [len(shape.seq_lens), shape.seq_lens[0]], "us": us})
    for latent in mla_attention.SHAPES["decode"]:
        us = times(mla, latent.name, "layer us", {"TRITON_MLA", "FLASHINFER_MLA", "FLASH_ATTN_MLA", "FLASHMLA"})
        made.append(
            {"is_mla": True, "heads": latent.heads, "load": [len(latent.seq_lens), latent.seq_lens[0]], "us": us}
        )
    return [row for row in made if row["us"]], where.pop()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    made, where = rows()
    lines = ",\n".join(f"  {json.dumps(row)}" for row in made)
    with open(TABLE, "w") as file:
        file.write(f'{{\n "where": {json.dumps(where)},\n "rows": [\n{lines}\n ]\n}}\n')
    print(f"{len(made)} shapes, measured on {where}, written to {TABLE}")


if __name__ == "__main__":
    main()
