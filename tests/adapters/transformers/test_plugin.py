"""A backend of a third party, which knows nothing of transformers, serves there under its name."""

from __future__ import annotations

import pytest
import torch

import attn_backends.adapters.transformers as ab
from attn_backends.interface import Unsupported
from tests.helpers.hf_cases import draw_case, generate_batch
from tests.helpers.naive_plugin import naive  # noqa: F401 (registers it)


def test_it_serves() -> None:
    assert "attn_backends:NAIVE" in ab.register()
    case = draw_case(2, "llama", most_rows=2, most_tokens=9)
    model = case.under("attn_backends:NAIVE")
    out = model.generate(case.ids, attention_mask=case.mask, max_new_tokens=4, do_sample=False, eos_token_id=None,
                         pad_token_id=0, return_dict_in_generate=True)  # fmt: skip
    assert out.past_key_values.backend == "NAIVE"
    eager = case.eager.generate(case.ids, attention_mask=case.mask, max_new_tokens=4, do_sample=False,
                                eos_token_id=None, pad_token_id=0)  # fmt: skip
    assert torch.equal(out.sequences, eager)
    outputs = generate_batch(model, case.prompts, 4, page_size=8, num_blocks=32, max_batch_tokens=32)
    assert [output.generated_tokens for output in outputs] == eager[:, case.ids.shape[1] :].tolist()


def test_its_refusals_are_transformers_users_too() -> None:
    ab.register()
    case = draw_case(2, "gpt_oss")
    with torch.no_grad(), pytest.raises(Unsupported, match="NAIVE"):
        case.under("attn_backends:NAIVE")(case.ids)
