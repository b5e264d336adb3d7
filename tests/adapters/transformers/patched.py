"""Runs under a transformers that has the patches, in a process of its own: `python patched.py FOLDER`.

There `register` wraps nothing, and both roads run on our cache with eager's tokens. FOLDER has the patches' own tests.
"""

from __future__ import annotations

import sys
import unittest
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

import attn_backends.adapters.transformers as ab
from attn_backends.adapters.transformers.continuous import attend_batch
from attn_backends.adapters.transformers.register import WRAPPED
from attn_backends.interface import Unsupported
from tests.helpers.hf_cases import draw_case, generate_batch

NAME = "attn_backends:TORCH"
METHODS = [
    transformers.GenerationMixin._prepare_cache_for_generation,
    ContinuousBatchingManager.switch_to_cb_friendly_attn,
    ContinuousBatchingManager.__init__,
]


def run(family: str) -> None:
    case = draw_case(5, family, most_rows=3)
    model = case.under(NAME)
    settings = {"attention_mask": case.mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    eager = case.eager.generate(case.ids, pad_token_id=0, **settings)
    out = model.generate(case.ids, pad_token_id=0, return_dict_in_generate=True, **settings)
    assert isinstance(out.past_key_values, ab.PagedCache)
    assert out.past_key_values.backend == "TORCH"
    assert torch.equal(out.sequences, eager)

    pages = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 32}
    with patch("attn_backends.adapters.transformers.attention.attend_batch", wraps=attend_batch) as attended:
        outputs = generate_batch(model, case.prompts, 6, **pages)
    assert attended.call_count >= 6 * case.eager.config.num_hidden_layers
    assert [output.generated_tokens for output in outputs] == eager[:, case.ids.shape[1] :].tolist()
    assert model.config._attn_implementation == NAME


def refuse() -> None:
    """What is not served is refused to the caller, before the first request of a batch."""
    case = draw_case(5, "llama")
    for call in (
        lambda: case.under(NAME).generate(case.ids, max_new_tokens=2, cache_implementation="static"),
        lambda: generate_batch(case.under("attn_backends:TORCH_MLA"), case.prompts, 2, page_size=8, num_blocks=16),
    ):
        try:
            call()
        except Unsupported:
            continue
        raise AssertionError("not refused")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    assert Path(transformers.__file__).is_relative_to(folder), transformers.__file__
    ab.register()
    assert not any(hasattr(method, WRAPPED) for method in METHODS)
    for family in ("llama", "gpt_oss"):
        run(family)
    refuse()
    theirs = unittest.defaultTestLoader.discover(str(folder / "tests" / "generation"))
    assert theirs.countTestCases() == 6
    assert unittest.TextTestRunner().run(theirs).wasSuccessful()
