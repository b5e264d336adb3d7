"""The `bench` command: times of the backends that are installed, at the user's layers, and the table AUTO goes by."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from attn_backends.cli.errors import EXIT_FAILED, Screen, clear_errors
from attn_backends.cli.tables import bar, print_json, print_rows

if TYPE_CHECKING:
    import torch

    from attn_backends.registry import Explanation, Load
    from attn_backends.registry.user_table import UserTable
    from attn_backends.spec import AttentionSpec, KVCacheSpec
    from attn_backends.testing.bench.loads import LoadCase
    from attn_backends.testing.bench.measure import Measurement

DEFAULT_MINUTES = 5.0
CPU_POOL_BYTES, GPU_POOL_SHARE = 1 << 29, 0.12  # what a backend's cache may take: each has its own, at once


@dataclass(frozen=True)
class ToMeasure:
    """What is to be measured, and where."""

    specs: dict[int, AttentionSpec]
    device: torch.device
    caches: Sequence[KVCacheSpec]
    cases: Sequence[LoadCase]
    load: Load  # that AUTO will be asked with
    verdicts: Explanation

    @property
    def names(self) -> list[str]:
        """The backends that serve the layers here and that AUTO may choose."""
        return [each.name for each in self.verdicts.verdicts if each.usable and each.priority is not None]


def bench(
    config: Annotated[Path | None, typer.Option("--config", help="YAML file, such as configs/cpu.yaml.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="A Hugging Face folder, a config.json alone, or a .gguf file.")
    ] = None,
    layers: Annotated[Path | None, typer.Option("--layers", help="YAML file of heads, in place of a model.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, … or auto.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32, float16, bfloat16 or auto.")] = None,
    minutes: Annotated[float, typer.Option("--minutes", min=0.0, help="How long to measure.")] = DEFAULT_MINUTES,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Keep the times, for AUTO to go by here.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be measured, and end.")] = False,
    chart: Annotated[
        Path | None, typer.Option("--chart", help="Folder for chart and PNG; by default beside the kept times.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure the backends that are installed at a model's layers, decode and prefill apart, and keep it for AUTO.

    Each is compared with the float64 reference before it is timed. AUTO then goes by these times on this device, for as
    long as the packages have the versions that were measured; attn-backends list says where its order comes from.
    """
    with clear_errors():
        asked = _asked(config, model, layers, device, dtype)
        if dry_run:
            return _print_plan(asked, minutes, save, as_json)
        found = _measure(asked, minutes)
        table = _table(asked, found)
        told = _keep(asked, table, found, save, chart)
    choice = _choice(asked)
    if as_json:
        print_json(_plain(table, found) | {"auto": choice, "written": told["written"], "notes": told["notes"]})
    else:
        _print(asked, found, [*told["written"], *told["notes"], choice])
    if not any(each.us for each in found):
        raise typer.Exit(EXIT_FAILED)


def _asked(
    config: Path | None, model: str | None, layers: Path | None, device: str | None, dtype: str | None
) -> ToMeasure:
    """What the options come to.

    Raises:
        ValueError: a model and layers are both given, or no backend serves the layers.
        ConfigError, ModelError: as reading a model's config raises them.
    """
    if layers is not None and model is not None:
        raise ValueError("--layers takes the place of --model: give one of them")
    import torch

    from attn_backends.engine.config_sources import load_config
    from attn_backends.engine.models.load import model_limit
    from attn_backends.engine.resolve import attention_specs, possible_caches, resolve_device, with_cache_dtype
    from attn_backends.registry import Load, explain
    from attn_backends.testing.bench.loads import bytes_per_key, cases, read_layers

    settings = load_config(config, {"model": model, "device": device, "dtype": dtype})
    where = resolve_device(settings.device)
    if layers is None:
        specs, limit = attention_specs(settings, where), model_limit(settings)
    else:
        file = read_layers(layers)
        default = torch.float32 if where.type == "cpu" else torch.bfloat16
        kind = default if settings.dtype == "auto" else getattr(torch, settings.dtype)
        each = [spec for heads in file.layers for spec in [heads.spec(kind)] * heads.count]
        specs, limit = {i: with_cache_dtype(spec, settings) for i, spec in enumerate(each)}, file.max_model_len
    scheduler = settings.scheduler
    limit = min(limit, scheduler.max_model_len or limit)
    pool_bytes = CPU_POOL_BYTES
    if where.type == "cuda":
        pool_bytes = int(GPU_POOL_SHARE * torch.cuda.mem_get_info(where)[0])
    most_keys = pool_bytes // max(map(bytes_per_key, specs.values()))
    most_requests = max(256, scheduler.max_num_requests)
    caches = possible_caches(settings)
    asked = ToMeasure(
        specs, where, caches, cases(limit, most_requests, 1 << 14, most_keys),
        Load(scheduler.max_num_requests, limit), explain("AUTO", specs, caches, where),
    )  # fmt: skip
    if not asked.names:
        raise ValueError(f"no backend that AUTO may choose serves these layers on {where}: {asked.verdicts.reason}")
    return asked


def _measure(asked: ToMeasure, minutes: float) -> list[Measurement]:
    from attn_backends.registry import get_backend
    from attn_backends.testing.bench.measure import Bench, Contender, make_clock

    verdicts = {each.name: each for each in asked.verdicts.verdicts}
    contenders = {name: Contender(get_backend(name), cache) for name in asked.names if (cache := verdicts[name].cache)}
    specs = list(dict.fromkeys(asked.specs.values()))
    runs = Bench(contenders, asked.device, 60 * minutes, make_clock(asked.device))
    return list(_shown(runs.run(specs, asked.cases), len(specs) * len(asked.cases), minutes))


def _shown(found: Iterator[Measurement], total: int, minutes: float) -> Iterator[Measurement]:
    """Each measurement, with a bar on a terminal and else a line."""
    console, started = Screen(stderr=True), time.monotonic()
    with bar(console) if console.is_terminal else nullcontext() as progress:
        task = progress.add_task("the first load", total=1.0) if progress else None
        for number, each in enumerate(found):
            best = f"{next(iter(each.us))} {next(iter(each.us.values())):,.1f} us" if each.us else "nothing ran"
            done = max(number / total, (time.monotonic() - started) / max(1e-9, 60 * minutes))
            if progress and task is not None:
                progress.update(task, completed=min(1.0, done), description=f"{each.case}: {best}")
            else:
                console.print(f"{each.case}: {escape(best)}, {each.rounds} rounds", highlight=False)
            yield each


def _table(asked: ToMeasure, found: Sequence[Measurement]) -> UserTable:
    """What is kept: times, and the versions of all packages whose backends could run on the device."""
    from attn_backends.machine import device_name
    from attn_backends.registry import get_entry
    from attn_backends.registry.user_table import UserTable, installed_versions

    could = [each.name for each in asked.verdicts.verdicts
             if all(found.rejection.code != "device" for found in each.rejections)]  # fmt: skip
    packages = [package for package in (get_entry(name).package for name in could) if package]
    versions = installed_versions(dict.fromkeys(["attn-backends", "torch", *packages]))
    rows = tuple(each.row() for each in found if each.us)
    return UserTable(str(device_name(asked.device)), datetime.now(UTC).strftime("%Y-%m-%d"), versions, rows)


def _keep(
    asked: ToMeasure, table: UserTable, found: Sequence[Measurement], save: bool, chart: Path | None
) -> dict[str, list[str]]:
    """Write the table and the chart; what was written, and what was not and why."""
    from attn_backends.registry.user_table import save_table, table_path
    from attn_backends.testing.bench.chart import NEEDS, can_draw, draw_times

    written, notes = [], []
    if save and table.rows:
        written.append(str(save_table(table)))
    folder = chart or (table_path(table.device).parent if save else None)
    if folder is not None and table.rows:
        if can_draw():
            title = f"{table.device}, {table.date}"
            written += map(str, draw_times(found, title, folder, table_path(table.device).stem))
        else:
            notes.append(NEEDS)
    return {"written": written, "notes": notes}


def _choice(asked: ToMeasure) -> str:
    """What AUTO takes now for these layers, and why."""
    from attn_backends.registry import explain

    chosen = explain("AUTO", asked.specs, asked.caches, asked.device, asked.load)
    return f"AUTO takes {chosen.chosen} for these layers. {chosen.reason}"


def _plain(table: UserTable, found: Sequence[Measurement]) -> dict[str, Any]:
    rows = [
        {"phase": each.case.phase, "num_requests": each.case.load.num_requests, "num_keys": each.case.load.num_keys,
         "heads": [each.spec.num_qo_heads, each.spec.num_kv_heads, each.spec.head_dim],
         "window_left": each.spec.window_left, "rounds": each.rounds, "us": each.us, "failed": each.failed}
        for each in found
    ]  # fmt: skip
    return {"device": table.device, "date": table.date, "versions": table.versions, "rows": rows}


def _print(asked: ToMeasure, found: Sequence[Measurement], lines: Sequence[str]) -> None:
    """A line a load: each backend's time in microseconds, and the fastest's name."""
    rows = [
        (str(each.case), each.layer,
         *(f"{each.us[name]:,.1f}" if name in each.us else "" for name in asked.names), next(iter(each.us), "none"))
        for each in found
    ]  # fmt: skip
    print_rows("load", "layer", *(f"{name} us" for name in asked.names), "fastest", rows=rows)
    failed = {f"{name} has no time of {each.case}: {why}" for each in found for name, why in each.failed.items()}
    console = Screen(soft_wrap=True)
    for line in [*sorted(failed), *lines]:
        console.print(escape(line), highlight=False)


def _print_plan(asked: ToMeasure, minutes: float, save: bool, as_json: bool) -> None:
    """What a run would measure, where it would keep it, and the backends that are left out."""
    from attn_backends.machine import device_name
    from attn_backends.registry.user_table import table_path

    name = str(device_name(asked.device))
    left_out = {each.name: each.reasons[0] for each in asked.verdicts.verdicts
                if each.is_candidate and not each.usable}  # fmt: skip
    plan = {"device": name, "minutes": minutes, "backends": asked.names, "loads": [*map(str, asked.cases)],
            "layers": len(set(asked.specs.values())), "would_write": str(table_path(name)) if save else None,
            "left_out": left_out}  # fmt: skip
    if as_json:
        return print_json(plan)
    for key, value in plan.items():
        text = "; ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else value
        words = ", ".join(map(str, text)) if isinstance(text, list) else text
        Screen(soft_wrap=True).print(f"{key.replace('_', ' ')}: {escape(str(words))}", highlight=False)
