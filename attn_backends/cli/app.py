"""The `attn-backends` command. `--help` and `--version` load no kernel library: commands import what they need."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from attn_backends.cli.bench import bench
from attn_backends.cli.errors import EXIT_FAILED, Commands, clear_errors
from attn_backends.cli.lint import lint
from attn_backends.cli.tables import print_doctor, print_explanation, print_json, print_list, print_support
from attn_backends.cli.verify import verify
from attn_backends.registry.table import installed_version

app = typer.Typer(
    cls=Commands,
    help="Paged-attention backends for LLM inference: which there are, which run here, and which one your model gets.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SPINS = "20000"  # by benchmarks/engine/busy_cores.py: as fast as more on idle cores, where 1,000 are not

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file, such as configs/cpu.yaml.")]
BackendOption = Annotated[str | None, typer.Option("--backend", help="A backend's name, or AUTO. Overrides the file.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, … or auto. Overrides the file.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(installed_version("attn-backends") or "not installed (a checkout): pip install -e .")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    # Have torch's threads spin for less long while they wait for one another, unless the environment says how long.
    # GNU's OpenMP, which torch has on Linux, lets them spin 300,000 times before they sleep. Where other work takes
    # some cores too, they then hold the core that the one needs for which all wait, and a text takes many times as
    # long. It reads the variable once, when torch is loaded.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


@app.command("list")
def list_backends(as_json: JsonOption = False) -> None:
    """Each backend: its package and version, whether it can be used here, and if not, why and what fixes it."""
    from attn_backends.registry import auto_order
    from attn_backends.registry.support import all_support, devices_here

    with clear_errors():
        found = all_support()
        order = auto_order(devices_here()[0])
    if as_json:
        return print_json([asdict(row) for row in found])
    print_list(found, order)


@app.command()
def doctor(
    name: Annotated[str, typer.Argument(help="A backend's name; attn-backends list shows them.")],
    device: Annotated[str, typer.Option("--device", help="Device to run the check on: cpu, cuda, … or auto.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Import a backend, look at its device and capabilities, and run it against the reference."""
    with clear_errors():
        from attn_backends.registry import auto_order, get_backend, get_entry
        from attn_backends.registry.support import choose_device, support

        row = support(get_entry(name))
        results = []
        if row.usable:
            chosen = choose_device(row, device)
            from attn_backends.testing.quick_check import quick_check

            results = quick_check(get_backend(name), chosen)
    healthy = row.usable and all(result.ok for result in results)
    if as_json:
        print_json(asdict(row) | {"checks": [asdict(result) for result in results], "ok": healthy})
    else:
        print_doctor(row, results, auto_order(row.device) if row.device else None)
    if not healthy:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def explain(
    config: ConfigOption = None,
    backend: BackendOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show each backend's verdict on the config's model and device, with reasons, and the one chosen."""
    with clear_errors():
        from attn_backends.engine.config_sources import load_config
        from attn_backends.registry import AUTO, Load, auto_order, explain as explained, get_entry, validate_options

        settings = load_config(config, {"backend": backend, "device": device})
        if settings.backend.upper() != AUTO:
            get_entry(settings.backend)  # an unknown name is said at once, before transformers and a model are read
        from attn_backends.engine.models.load import model_limit
        from attn_backends.engine.resolve import attention_specs, longest_request, possible_caches, resolve_device

        where, options = resolve_device(settings.device), settings.backend_options
        specs, caches = attention_specs(settings, where), possible_caches(settings)
        load = Load(settings.scheduler.max_num_requests, longest_request(settings, model_limit(settings)))
        explanation = explained(settings.backend, specs, caches, where, load, options)
        if explanation.chosen:
            validate_options(explanation.chosen, options)
        order = auto_order(where)
    if as_json:
        print_json(explanation.to_dict() | {"auto_order": order})
    else:
        print_explanation(explanation, order)
    if explanation.chosen is None:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def generate(
    config: ConfigOption = None,
    backend: BackendOption = None,
    device: DeviceOption = None,
    model: Annotated[
        str | None, typer.Option("--model", help="smollm2-135m-instruct, a Hugging Face folder, or a .gguf file.")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32, float16, bfloat16 or auto.")] = None,
    accelerate: Annotated[
        str | None, typer.Option("--accelerate", help="off: the model as it is; on; or compile, for GPUs: starts late.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be given again.")] = None,
    prompts_file: Annotated[Path | None, typer.Option("--prompts-file", help="A text file, one prompt a line.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Most new tokens a prompt.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Sample among this many tokens.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="Sample within this probability mass.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes sampled tokens the same in every run.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="A text that ends it; may be given again.")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Use the chat template or not; default: if there is one.")
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Show text as it is made, or at the end.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Answer prompts: from --prompt, a file, or stdin; without any, four examples. All are generated at once."""
    with clear_errors():
        from attn_backends.cli.generate import answer, read_prompts
        from attn_backends.engine.config_sources import load_config

        overrides = {
            "backend": backend,
            "device": device,
            "model": model,
            "dtype": dtype,
            "accelerate": accelerate,
            "sampling.max_tokens": max_tokens,
            "sampling.temperature": temperature,
            "sampling.top_k": top_k,
            "sampling.top_p": top_p,
            "sampling.seed": seed,
            "sampling.stop": stop or None,
        }
        settings = load_config(config, overrides)
        prompts = read_prompts(prompt or [], prompts_file)
        code = answer(settings, prompts, chat=chat, stream=stream, as_json=as_json)
    raise typer.Exit(code)


app.command()(verify)
app.command()(bench)
app.command()(lint)


def support_table(as_json: JsonOption = False) -> None:
    """What each backend honours; `python registry.py` runs it."""
    from attn_backends.registry.support import all_support

    found = all_support()
    if as_json:
        return print_json([asdict(row) for row in found])
    print_support(found)


if __name__ == "__main__":
    app()
