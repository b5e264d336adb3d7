"""One process of vLLM that serves some scenarios, one after the other: `serve.py FOLDER OUT SCENARIO ...`."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest
from vllm.platforms.cpu import CpuPlatform

sys.path.insert(0, str(Path(__file__).parent))
import scenarios as given
import streams

OURS = ("env", "random", "model", "lora", "kept", "streams")  # of a scenario: what is no setting of vLLM's


def served(llm: LLM, scenario: dict[str, Any], folder: str) -> dict[str, Any]:
    """Tokens and their log-probabilities, of two rounds: the second finds prefixes in the cache."""
    if scenario.get("random"):
        rounds = [[{"prompt_token_ids": prompt} for prompt in prompts] for prompts in given.random_rounds()]
    else:
        rounds = [given.PROMPTS, given.AGAIN]
    params = SamplingParams(
        max_tokens=given.NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=0, detokenize=not scenario.get("random")
    )
    lora = LoRARequest(given.LORA, 1, f"{folder}/{given.LORA}") if scenario.get("lora") else None
    outputs = [
        out.outputs[0] for each in rounds for out in llm.generate(each, params, use_tqdm=False, lora_request=lora)
    ]
    return {
        "tokens": [list(out.token_ids) for out in outputs],
        "logprobs": [[next(iter(each.values())).logprob for each in out.logprobs] for out in outputs],
        "impls": impls(llm),
        "scheduler": scheduler(llm),
    }


def impls(llm: LLM) -> list[str]:
    """The classes that serve the layers, where they are in this process."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None or llm.llm_engine.vllm_config.parallel_config.world_size > 1:
        return []
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return sorted({type(layer.impl).__name__ for layer in layers.values() if hasattr(layer, "impl")})


def scheduler(llm: LLM) -> str:
    """The class that schedules, where it is in this process."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    return "" if core is None else type(core.scheduler).__name__


def untouched() -> dict[str, Any]:
    """What the plugin has left behind."""
    from vllm.v1.attention.backends.registry import _ATTN_OVERRIDES, AttentionBackendEnum

    replaced = sorted(each.name for each in _ATTN_OVERRIDES if not each.name.startswith("AB_"))
    return {"names": sorted(AttentionBackendEnum.__members__), "replaced": replaced}


def keep(settings: dict[str, Any]) -> Callable[[], None]:
    """Have settings stand that vLLM's platform of CPUs changes, until what is returned is called."""
    its, bound = vars(CpuPlatform)["check_and_update_config"], CpuPlatform.check_and_update_config

    def check(config: Any) -> None:
        bound(config)
        for path, value in settings.items():
            part, name = path.split(".")
            setattr(getattr(config, part), name, value)

    CpuPlatform.check_and_update_config = staticmethod(check)
    return lambda: setattr(CpuPlatform, "check_and_update_config", its)


def main() -> None:
    folder, out, *names = sys.argv[1:]
    made: dict[str, Any] = {}
    for name in names:
        scenario = dict(given.SERVED[name])
        settings = given.COMMON | {k: v for k, v in scenario.items() if k not in OURS}
        settings = json.loads(json.dumps(settings).replace(given.FOLDER, folder))
        if scenario.get("random"):
            settings |= {"skip_tokenizer_init": True}
        if scenario.get("streams"):
            streams.install()
        undo = keep(scenario.get("kept", {}))
        llm = LLM(f"{folder}/{scenario.get('model', given.SMOLLM2)}", **settings)
        made[name] = served(llm, scenario, folder)
        Path(out).write_text(json.dumps({"served": made, "registry": untouched()}))
        undo()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
