"""`PagedCache` from turn to turn: growing, cropped, copied, its rows put elsewhere; eager's tokens each time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import attn_backends.adapters.transformers as ab
from attn_backends.interface import Unsupported
from tests.helpers.hf_cases import Case, draw_batch, draw_case

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module", params=["llama", "gemma2", "deepseek_v3"])
def case(request: pytest.FixtureRequest) -> Case:
    ab.register()
    return draw_case(11, request.param, most_rows=3)


def check_forward(case: Case, model: Any, cache: Any, ids: Tensor, mask: Tensor, new: int) -> None:
    """The last `new` tokens, in one forward over the cache."""
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -new:]
        out = model(input_ids=ids[:, -new:], attention_mask=mask, position_ids=positions, past_key_values=cache)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        wanted = case.eager(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    difference = out.logits.log_softmax(-1) - wanted[:, -new:].log_softmax(-1)
    assert difference[mask[:, -new:].bool()].abs().max() < 3e-5  # of float32: sums come in another order


def test_a_loop_of_ones_own_over_a_cache_that_grows(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_backends.adapters.transformers.pool.SPARE_TOKENS", 1)
    model, cache = case.under("attn_backends:TORCH"), ab.PagedCache(case.eager.config, page_size=4)
    ids, mask = draw_batch(case.rng, 3, 9)
    check_forward(case, model, cache, ids, mask, ids.shape[1])
    for new in (1, 1, 7, 1, 30, 2, 40):
        ids = torch.cat([ids, torch.randint(3, 97, (len(ids), new))], 1)
        mask = torch.cat([mask, torch.ones(len(ids), new, dtype=torch.long)], 1)
        check_forward(case, model, cache, ids, mask, new)
    assert cache.get_seq_length() == ids.shape[1]


def test_a_session_of_several_generate_calls(case: Case) -> None:
    model, cache = case.under("attn_backends:TORCH"), ab.PagedCache(case.eager.config)
    ids, mask = case.ids, case.mask
    for _ in range(3):
        got = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=9, **GREEDY)
        assert torch.equal(got, case.eager.generate(ids, attention_mask=mask, max_new_tokens=9, **GREEDY))
        ids = torch.cat([got, torch.randint(3, 97, (len(got), 5))], 1)
        mask = torch.cat([mask, torch.ones(len(got), 14, dtype=torch.long)], 1)


def test_a_session_within_inference_mode_and_without(case: Case) -> None:
    """Pages, and what plans write to, can be written in either."""
    model, ids = case.under("attn_backends:TORCH"), torch.randint(3, 97, (1, 5))
    cache = ab.PagedCache(case.eager.config)
    with torch.inference_mode():
        ids = model.generate(ids, past_key_values=cache, max_new_tokens=3, **GREEDY)
        cache.batch_select_indices(torch.zeros(2, dtype=torch.long))
        cache = copy.deepcopy(cache)
    ids = ids.clone().repeat(2, 1)
    got = model.generate(ids, past_key_values=cache, max_new_tokens=5, **GREEDY)
    assert torch.equal(got, case.eager.generate(ids, max_new_tokens=5, **GREEDY))


def test_a_padded_row_that_leaves(case: Case) -> None:
    """The others have no padding then, and a mask of ones is none."""
    model, ids = case.under("attn_backends:TORCH"), torch.randint(3, 97, (2, 9))
    cache = ab.PagedCache(case.eager.config)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    cache.batch_select_indices(torch.zeros(1, dtype=torch.long))
    ids = torch.cat([ids[:1], torch.randint(3, 97, (1, 2))], 1)
    check_forward(case, model, cache, ids, torch.ones_like(ids), 2)


def test_generate_calls_of_other_sizes_do_not_meet(case: Case) -> None:
    model = case.under("attn_backends:TORCH")
    for _ in range(3):
        ids, mask = draw_batch(case.rng, 4, 30)
        settings = GREEDY | {"attention_mask": mask, "max_new_tokens": int(case.rng.integers(1, 12))}
        assert torch.equal(model.generate(ids, **settings), case.eager.generate(ids, **settings))


def test_without_a_cache(case: Case) -> None:
    model, settings = case.under("attn_backends:TORCH"), GREEDY | {"attention_mask": case.mask, "max_new_tokens": 4}
    assert torch.equal(model.generate(case.ids, use_cache=False, **settings), case.eager.generate(case.ids, **settings))


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
def test_beams(case: Case, settings: dict[str, int]) -> None:
    settings |= GREEDY | {"attention_mask": case.mask, "max_new_tokens": 8}
    got = case.under("attn_backends:TORCH").generate(case.ids, **settings)
    assert torch.equal(got, case.eager.generate(case.ids, **settings))


def test_assisted_decoding_takes_back_what_was_not_accepted(case: Case) -> None:
    """Drafts of another random model are seldom right: the cache is cropped at each step."""
    prompt = torch.tensor([case.prompts[0]])
    draft = draw_case(23, case.family).under("attn_backends:TORCH")
    got = case.under("attn_backends:TORCH").generate(prompt, assistant_model=draft, max_new_tokens=15, **GREEDY)
    assert torch.equal(got, case.eager.generate(prompt, max_new_tokens=15, **GREEDY))


def test_prompt_lookup(case: Case) -> None:
    prompt = torch.tensor([case.prompts[0] * 3])
    settings = GREEDY | {"max_new_tokens": 15}
    got = case.under("attn_backends:TORCH").generate(prompt, prompt_lookup_num_tokens=3, **settings)
    assert torch.equal(got, case.eager.generate(prompt, **settings))


def test_crop_of_padded_rows(case: Case) -> None:
    model, cache = case.under("attn_backends:TORCH"), ab.PagedCache(case.eager.config)
    check_forward(case, model, cache, case.ids, case.mask, case.ids.shape[1])
    cache.crop(-(case.ids.shape[1] - 1))
    assert cache.get_seq_length() == 1
    ids = torch.cat([case.ids[:, :1], torch.randint(3, 97, (len(case.ids), 4))], 1)
    mask = torch.cat([case.mask[:, :1], torch.ones(len(case.ids), 4, dtype=torch.long)], 1)
    check_forward(case, model, cache, ids, mask, 4)


def test_crop_to_a_length(case: Case) -> None:
    cache = ab.PagedCache(case.eager.config)
    model = case.under("attn_backends:TORCH")
    check_forward(case, model, cache, case.ids, case.mask, case.ids.shape[1])
    cache.crop(2)
    assert cache.get_seq_length() == 2
    with pytest.raises(ValueError, match="the cache has 2"):
        cache.crop(-3)


def test_a_copy_goes_its_own_way(case: Case) -> None:
    """One prompt, computed once, that several answers begin with."""
    model, cache = case.under("attn_backends:TORCH"), ab.PagedCache(case.eager.config)
    prompt = torch.tensor([case.prompts[0]])
    ones = torch.ones_like(prompt)
    check_forward(case, model, cache, prompt, ones, prompt.shape[1])
    for question in (torch.randint(3, 97, (1, 6)), torch.randint(3, 97, (1, 3))):
        ids = torch.cat([prompt, question], 1)
        check_forward(case, model, copy.deepcopy(cache), ids, torch.ones_like(ids), question.shape[1])
    assert cache.get_seq_length() == prompt.shape[1]


@pytest.mark.parametrize("how", ["repeat", "select"])
def test_rows_are_put_elsewhere(case: Case, how: str) -> None:
    model, cache = case.under("attn_backends:TORCH"), ab.PagedCache(case.eager.config)
    check_forward(case, model, cache, case.ids, case.mask, case.ids.shape[1])
    rows = torch.arange(len(case.ids)).repeat_interleave(2)
    if how == "select":
        rows = torch.tensor([len(case.ids) - 1])
        cache.batch_select_indices(rows)
    else:
        cache.batch_repeat_interleave(2)
    ids = torch.cat([case.ids[rows], torch.randint(3, 97, (len(rows), 5))], 1)
    mask = torch.cat([case.mask[rows], torch.ones(len(rows), 5, dtype=torch.long)], 1)
    check_forward(case, model, cache, ids, mask, 5)


def test_a_cache_that_nothing_was_put_into_has_no_rows_to_put_elsewhere(case: Case) -> None:
    model, cache = case.under("attn_backends:TORCH"), ab.PagedCache(case.eager.config)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.zeros(2, dtype=torch.long))
    assert cache.get_seq_length() == 0
    check_forward(case, model, cache, case.ids, case.mask, case.ids.shape[1])


def test_reset_takes_another_batch(case: Case) -> None:
    model, cache = case.under("attn_backends:TORCH"), ab.PagedCache(case.eager.config)
    for rows in (1, 3):
        ids = torch.randint(3, 97, (rows, 6))
        check_forward(case, model, cache, ids, torch.ones_like(ids), 6)
        cache.reset()
        assert cache.get_seq_length() == 0


def test_right_padding(case: Case) -> None:
    """Rows end in padding and go on behind it: equal where all keys are seen, and refused where places matter."""
    model, cache = case.under("attn_backends:TORCH"), ab.PagedCache(case.eager.config)
    ids, mask = torch.randint(3, 97, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, 4:] = 0
    check_forward(case, model, cache, ids, mask, 9)
    ids = torch.cat([ids, torch.randint(3, 97, (2, 3))], 1)
    mask = torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], 1)
    if "sliding_attention" in (getattr(case.eager.config, "layer_types", None) or ()):
        with pytest.raises(Unsupported, match="padding_side = 'left'"):
            check_forward(case, model, cache, ids, mask, 3)
    else:
        check_forward(case, model, cache, ids, mask, 3)


def test_a_chunk_of_padding_alone(case: Case) -> None:
    model, cache = case.under("attn_backends:TORCH"), ab.PagedCache(case.eager.config)
    ids, mask = torch.randint(3, 97, (2, 8)), torch.zeros(2, 8, dtype=torch.long)
    mask[0, 3:] = mask[1, 6:] = 1
    with torch.no_grad():
        model(input_ids=ids[:, :3], attention_mask=mask[:, :3], past_key_values=cache)
    check_forward(case, model, cache, ids, mask, 5)


def test_the_pools_growth_stops_at_the_length_that_generate_knows(case: Case) -> None:
    ids = torch.randint(3, 97, (2, 5))
    out = case.under("attn_backends:TORCH").generate(ids, max_new_tokens=4, return_dict_in_generate=True, **GREEDY)
    pages = out.past_key_values._pool.caches[0].key.shape[:2]
    assert pages.numel() <= 2 * 16, "nine tokens a row take one page of sixteen each"


def test_latents_that_look_like_keys() -> None:
    """One head, and as many latents as a key has numbers: what reaches attention has the shape that the cache saw."""
    ab.register()
    config = draw_case(3, "deepseek_v3").eager.config
    for name, value in {"num_attention_heads": 1, "num_key_value_heads": 1, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
                        "qk_rope_head_dim": 8, "v_head_dim": 8}.items():  # fmt: skip
        setattr(config, name, value)
    config.qk_head_dim, config.head_dim = 16, 8
    alike = draw_case(3, "deepseek_v3")
    alike.eager = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model, cache = alike.under("attn_backends:TORCH"), ab.PagedCache(config)
    check_forward(alike, model, cache, alike.ids, alike.mask, alike.ids.shape[1])
    ids = torch.cat([alike.ids, torch.randint(3, 97, (len(alike.ids), 1))], 1)
    mask = torch.cat([alike.mask, torch.ones(len(alike.ids), 1, dtype=torch.long)], 1)
    check_forward(alike, model, cache, ids, mask, 1)


def test_several_threads(case: Case) -> None:
    from concurrent.futures import ThreadPoolExecutor

    model = case.under("attn_backends:TORCH")
    batches = [draw_batch(case.rng, 3, 20) for _ in range(6)]

    def run(batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens: Tensor = model.generate(batch[0], attention_mask=batch[1], max_new_tokens=6, **GREEDY)
        return tokens

    with ThreadPoolExecutor(3) as threads:
        got = list(threads.map(run, batches))
    for (ids, mask), tokens in zip(batches, got, strict=True):
        assert torch.equal(tokens, case.eager.generate(ids, attention_mask=mask, max_new_tokens=6, **GREEDY))


def test_it_is_a_cache_of_transformers(case: Case) -> None:
    cache = ab.PagedCache(case.eager.config)
    assert isinstance(cache, transformers.Cache)
    assert len(cache) == case.eager.config.num_hidden_layers
    assert cache.backend is None
