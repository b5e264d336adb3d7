"""Our backends as `attn_implementation` of Hugging Face transformers.

    import attn_backends.adapters.transformers as ab

    ab.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attn_backends:TORCH")

`generate()` runs over a `PagedCache`, and `generate_batch()` over transformers' own paged cache. What is not served is
refused by `Unsupported`, with reasons.
"""

from attn_backends.adapters.engine_version import check_engine_version
from attn_backends.interface.contract import check_contract

check_contract("the transformers adapter", (1, 0))
check_engine_version("transformers", "5.17", "5.23")

from attn_backends.adapters.transformers.paged_cache import PagedCache  # noqa: E402  # after the checks
from attn_backends.adapters.transformers.register import register  # noqa: E402

__all__ = ["PagedCache", "register"]
