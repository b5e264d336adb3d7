"""What is not served is refused by name, with what to do: it is never computed some other way."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers

import attn_backends.adapters.transformers as ab
from attn_backends.adapters.transformers.layers import CalledLayers
from attn_backends.adapters.transformers.masks import OwnAttention, padding_in, padding_mask
from attn_backends.interface import Unsupported
from attn_backends.spec import AttentionSpec, KVCacheSpec
from tests.helpers.hf_cases import batching_config_class, draw_case, generate_batch
from tests.helpers.tiny_models import COMMON, tiny_model

NAME = "attn_backends:TORCH"
IDS = torch.arange(3, 11)[None]


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    ab.register()
    with torch.no_grad():
        yield


def tiny(config_class: str, name: str = NAME, **settings: Any) -> Any:
    config = getattr(transformers, config_class)(**COMMON | settings)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()


def refused(*words: str) -> Any:
    return pytest.raises(Unsupported, match="(?s)" + ".*".join(map(re.escape, words)))


def test_a_backend_refuses_a_layer_with_its_own_reasons() -> None:
    with refused("TORCH_MLA", "mla: got plain attention"):
        tiny("LlamaConfig", "attn_backends:TORCH_MLA")(IDS)


def test_training() -> None:
    model = tiny("LlamaConfig", attention_dropout=0.1)
    with torch.enable_grad(), refused("training", "no_grad"):
        model(IDS)
    with refused("training", "dropout=0.1"):
        model.train()(IDS)


def test_training_of_values_alone() -> None:
    """As adapters on v_proj do: queries and keys want no gradients."""
    model = tiny("LlamaConfig")
    for name, weight in model.named_parameters():
        weight.requires_grad_("layers.1.self_attn.v_proj" in name)
    with torch.enable_grad(), refused("training", "gradients wanted"):
        model(IDS, use_cache=False)


@pytest.mark.parametrize("settings", [{"cache_implementation": "static"}, {"cache_implementation": "offloaded"},
                                      {"cache_implementation": "quantized"}], ids=str)  # fmt: skip
def test_caches_of_other_kinds(settings: dict[str, str]) -> None:
    with refused("past_key_values", settings["cache_implementation"], "PagedCache"):
        tiny("LlamaConfig").generate(IDS, max_new_tokens=2, **settings)


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
def test_caches_that_a_caller_passes(kind: str) -> None:
    model = tiny("LlamaConfig")
    own = {"max_cache_len": 32} if kind == "StaticCache" else {}
    cache = getattr(transformers, kind)(config=model.config, **own)
    with refused("past_key_values", kind, "PagedCache(model.config)"):
        model.generate(IDS, max_new_tokens=2, past_key_values=cache)
    with refused("past_key_values", "PagedCache"):
        model(IDS, past_key_values=cache)
        model(IDS[:, :1], past_key_values=cache)


def test_another_backend_over_the_same_pages() -> None:
    model, cache = tiny("LlamaConfig"), ab.PagedCache(tiny("LlamaConfig").config)
    model(IDS, past_key_values=cache)
    model.set_attn_implementation("attn_backends:AUTO")
    with refused("attn_backends:AUTO", "attn_backends:TORCH", "new PagedCache"):
        model(IDS, past_key_values=cache)


def test_a_batch_of_another_size() -> None:
    model, cache = tiny("LlamaConfig"), ab.PagedCache(tiny("LlamaConfig").config)
    model(IDS, past_key_values=cache)
    with refused("batch_size", "2 rows", "reset()"):
        model(IDS.repeat(2, 1), past_key_values=cache)


@pytest.mark.parametrize("other", [{"dtype": torch.bfloat16}, {"num_key_value_heads": 4}, {"head_dim": 32}], ids=str)
def test_a_model_whose_keys_are_not_as_those_cached(other: dict[str, Any]) -> None:
    model, cache = tiny("LlamaConfig"), ab.PagedCache(tiny("LlamaConfig").config)
    model(IDS, past_key_values=cache)
    changed = tiny("LlamaConfig", **other).to(other.get("dtype", torch.float32))
    with refused("past_key_values", "as cached", "Begin anew"):
        changed(IDS, past_key_values=cache)


class TestMasks:
    def test_four_dimensions(self) -> None:
        mask = torch.zeros(1, 1, 8, 8)
        with refused("attention_mask", "[1, 1, 8, 8]"):
            tiny("LlamaConfig")(IDS, attention_mask=mask)

    def test_a_rule_of_ones_own(self) -> None:
        from transformers.masking_utils import create_causal_mask

        model = tiny("LlamaConfig")
        with refused("mask", "a mask by or_masks"):

            def looks_back(batch: Any, head: Any, query: Any, key: Any) -> Any:
                return key == 0

            create_causal_mask(model.config, torch.zeros(1, 8, 64), None, None, or_mask_function=looks_back)

    def test_packed_sequences(self) -> None:
        positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
        with refused("attention_mask", "[1, 0]"):
            tiny("LlamaConfig")(IDS, position_ids=positions, use_cache=False)
        with refused("cu_seq_lens_q"):
            tiny("LlamaConfig")(IDS, cu_seq_lens_q=torch.tensor([0, 5, 8]), use_cache=False)

    def test_a_mask_that_changes_its_mind(self) -> None:
        model, cache, mask = tiny("LlamaConfig"), ab.PagedCache(tiny("LlamaConfig").config), torch.ones(1, 8)
        model(IDS, past_key_values=cache, attention_mask=mask)
        other = torch.ones(1, 9)
        other[0, 2] = 0
        with refused("attention_mask", "masked now"):
            model(IDS[:, :1], past_key_values=cache, attention_mask=other)

    def test_padding_that_is_forgotten(self) -> None:
        model, cache, mask = tiny("LlamaConfig"), ab.PagedCache(tiny("LlamaConfig").config), torch.ones(1, 8)
        mask[0, :3] = 0
        model(IDS, past_key_values=cache, attention_mask=mask)
        with refused("attention_mask", "padding that is no longer"):
            model(IDS[:, :1], past_key_values=cache)

    def test_chunked_attention(self) -> None:
        model = tiny("Llama4TextConfig", num_local_experts=1, attention_chunk_size=4, head_dim=16,
                     intermediate_size_mlp=96, num_experts_per_tok=1)  # fmt: skip
        with refused("mask", "a mask by chunked_overlay"):
            model(IDS, use_cache=False)
        with refused("chunked_attention"):
            model.generate(IDS, max_new_tokens=2)


class TestModels:
    def test_encoders(self) -> None:
        config = transformers.BertConfig(
            hidden_size=64, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64
        )
        model = transformers.AutoModel.from_config(config, attn_implementation=NAME).eval()
        with refused("sdpa"):
            model(IDS)

    def test_an_encoder_with_a_decoder(self) -> None:
        config = transformers.BartConfig(d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                                         decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64)  # fmt: skip
        model = transformers.BartForConditionalGeneration._from_config(config, attn_implementation=NAME).eval()
        with refused("sdpa"):
            model.generate(IDS, max_new_tokens=2)

    def test_linear_attention(self) -> None:
        config = transformers.Qwen3NextConfig(**COMMON | {"head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1})
        with refused("linear_attention"):
            ab.PagedCache(config)

    @pytest.mark.parametrize("window", [0, -1])
    def test_windows_without_a_key(self, window: int) -> None:
        """Not even the query's own: it would be taken for no window."""
        with refused("window_left", f"layer 0 with sliding_window={window}", "None for no window"):
            tiny("MistralConfig", sliding_window=window)(IDS, use_cache=False)

    def test_shared_keys(self) -> None:
        config = transformers.Gemma3nTextConfig(**COMMON | {"num_kv_shared_layers": 2, "head_dim": 16})
        with refused("kv_sharing"):
            ab.PagedCache(config)

    def test_models_with_attention_of_their_own(self) -> None:
        """GPT-J takes any name and computes attention itself: over new keys alone it would answer nonsense."""
        config = transformers.GPTJConfig(vocab_size=97, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=64)
        model = transformers.GPTJForCausalLM(config).eval()
        model.config._attn_implementation_internal = NAME
        with refused("gptj, which works attention out itself"):
            model(IDS, past_key_values=ab.PagedCache(model.config))

    def test_layers_that_do_not_call_attention(self) -> None:
        cache, keys = ab.PagedCache(tiny("LlamaConfig").config), torch.zeros(1, 2, 8, 16)
        cache.update(keys, keys, 0)
        with refused("layer 0 did not call the attention function", "Load this model with sdpa"):
            cache.update(keys, keys, 1)

    @pytest.mark.parametrize("kind", ["Bloom", "GPTNeoXJapanese", "XGLM"])
    @pytest.mark.parametrize("padding", [0, 3])
    def test_models_that_ask_for_a_mask_alone(self, kind: str, padding: int) -> None:
        """No mask would let each of their tokens see all others, and one of padding fits a batch of one row."""
        config = getattr(transformers, f"{kind}Config")(vocab_size=97, hidden_size=64, num_hidden_layers=2)
        model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation=NAME).eval()
        mask = torch.ones_like(IDS)
        mask[:, :padding] = 0
        with refused("attention", "works attention out itself", "Load this model with eager"):
            model(IDS, attention_mask=mask, use_cache=False)

    @pytest.mark.parametrize(("layer", "num_keys"), [(1, 8), (0, 7)])
    def test_keys_of_another_layer_and_of_other_tokens(self, layer: int, num_keys: int) -> None:
        """A layer that attends to what another's cache handed on, or to a part of it."""
        model = tiny("LlamaConfig")
        cache, keys = ab.PagedCache(model.config), torch.zeros(1, 2, 8, 16)
        cache.update(keys, keys, 0)
        given = keys[:, :, :num_keys]
        with refused("keys", f"{num_keys} keys at layer {layer}, where layer 0 of the cache handed on 8"):
            transformers.AttentionInterface()[NAME](
                model.model.layers[layer].self_attn, torch.zeros(1, 4, 8, 16), given, given, None
            )

    def test_a_cache_that_a_model_of_fewer_layers_has_filled(self) -> None:
        model, fewer = tiny("LlamaConfig"), tiny("LlamaConfig", num_hidden_layers=1)
        cache = ab.PagedCache(model.config)
        fewer(IDS, past_key_values=cache)
        with refused("layer 1 has seen 0 tokens, others of this cache more"):
            model(IDS, past_key_values=cache)

    def test_layers_on_two_devices(self) -> None:
        layers = CalledLayers("TORCH", {}, [KVCacheSpec(None, 16)])
        layers.show(AttentionSpec(4, 2, 16), torch.device("cpu"))
        with refused("a layer on meta, others on cpu", "Load with device_map=None"):
            layers.show(AttentionSpec(4, 4, 16), torch.device("meta"))

    def test_layers_that_attend_twice(self) -> None:
        """DiffLlama's second call has no keys of the cache: it would see new ones alone."""
        model = tiny("DiffLlamaConfig")
        with refused("layer 0 attends twice in a forward"):
            model.generate(IDS, max_new_tokens=2)
        tokens = model(IDS, use_cache=False).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(tokens, model(IDS, use_cache=False).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("padding", [0, 3])
def test_models_that_call_the_interface_have_a_mask_like_any_other(
    padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Some look at it before they hand it on."""
    masks: list[Any] = []
    monkeypatch.setattr("attn_backends.adapters.transformers.attention.padding_in",
                        lambda mask: (masks.append(mask), padding_in(mask))[1])  # fmt: skip
    mask = torch.ones_like(IDS)
    mask[:, :padding] = 0
    tiny("LlamaConfig")(IDS, attention_mask=mask, use_cache=False)
    assert {type(each) for each in masks} == {torch.Tensor if padding else type(None)}


def test_a_mask_of_fewer_columns_than_keys_is_no_want_of_padding() -> None:
    mask = padding_in(padding_mask(1, 8, 8, attention_mask=torch.ones(1, 5, dtype=torch.bool)))
    assert mask is not None
    assert mask.shape == (1, 5)
    assert padding_in(padding_mask(1, 8, 8, attention_mask=torch.ones(1, 9, dtype=torch.bool))) is None


def test_decodes_that_bring_a_page_table() -> None:
    """As continuous batching does for FlashAttention: they bring no slots to read."""
    with refused("cuda_graph", "a decode batch for FlashAttention", "max_blocks_per_request=0"):
        tiny("LlamaConfig")(IDS, use_cache=False, cache=ab.PagedCache, block_table=torch.zeros(1, 4))


def test_a_mask_of_no_model_is_of_no_use() -> None:
    """Whatever a model's own code does with it is refused."""
    scores, mask = torch.zeros(1, 1, 8, 8), OwnAttention(None, None)
    for use in (lambda: scores + mask, lambda: mask + scores, lambda: torch.add(scores, mask), lambda: mask[:, :, :8],
                lambda: scores.masked_fill(mask, 0), lambda: torch.where(~mask, scores, scores), lambda: mask.dtype,
                lambda: 1 - mask, lambda: bool(mask)):  # fmt: skip
        with refused("attention", "this model, which works attention out itself"):
            use()
    assert padding_in(mask) is None
    assert padding_in(OwnAttention(scores, None)) is padding_in(scores) is scores


def test_what_an_interrupted_forward_left_meets_no_other() -> None:
    """A forward that broke off behind a cache's `update`; then one without a cache, as long, at the same layer."""
    model, cache = tiny("LlamaConfig"), ab.PagedCache(tiny("LlamaConfig").config)
    wanted = model(IDS, use_cache=False).logits
    model(IDS.flip(1), past_key_values=cache)
    cache.update(torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16), 0)
    assert torch.equal(model(IDS, use_cache=False).logits, wanted)


class TestContinuousBatching:
    @pytest.mark.parametrize("what", ["graphs", "compiled"])
    def test_graphs_and_compilation(self, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        settings = {"page_size": 16, "num_blocks": 8, "max_batch_tokens": 16}
        if what == "graphs":  # there are none without a GPU
            config_class = batching_config_class()
            monkeypatch.setattr(config_class, "cuda_graph_booleans", property(lambda self: (True, False)))
        else:
            settings["varlen_compile_config"] = transformers.CompileConfig()
        with refused("cuda_graph", "use_cuda_graph=False"):
            generate_batch(tiny("LlamaConfig"), [[3, 4, 5]], 2, **settings)

    def test_a_backend_that_does_not_take_the_page_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Before the thread starts that would only log it."""
        from attn_backends.registry import get_backend

        torch_backend = get_backend("TORCH")
        can = torch_backend.capabilities()
        monkeypatch.setattr(
            torch_backend, "capabilities", lambda: can.__class__(**vars(can) | {"page_size_multiple": 64})
        )
        with refused("page_size", "got 16"):
            generate_batch(tiny("LlamaConfig"), [[3, 4, 5]], 2, page_size=16, num_blocks=8, max_batch_tokens=16)

    def test_keys_that_are_not_those_of_the_cache(self) -> None:
        """JetMoE repeats them behind its cache: more heads than a page has would be read as other tokens' keys."""
        model = tiny("JetMoeConfig", num_local_experts=4, num_experts_per_tok=2, kv_channels=16, num_key_value_heads=2)
        (output,) = generate_batch(model, [[3, 4, 5]], 2, page_size=16, num_blocks=8, max_batch_tokens=16)
        assert "keys: got 4 heads of 16 at layer 0, whose cache keeps 2 of 16" in output.error

    def test_latents(self) -> None:
        """transformers itself has no pages for what such models cache."""
        model = draw_case(3, "deepseek_v3").under(NAME)
        outputs = generate_batch(model, [[3, 4, 5]], 2, page_size=16, num_blocks=8, max_batch_tokens=16)
        assert outputs[0].error or len(outputs[0].generated_tokens) == 0


def test_names_that_transformers_gives_a_meaning_are_not_among_ours() -> None:
    names = ab.register()
    assert "attn_backends:AUTO" in names
    assert not [name for name in names if any(word in name for word in ("flash", "sdpa", "flex_attention", "/", "|"))]


def test_options_are_validated_by_their_backend() -> None:
    from attn_backends.validation import ConfigError

    try:
        ab.register(options={"TORCH": {"no_such_option": 1}})
        with pytest.raises(ConfigError, match="no_such_option"):
            tiny("LlamaConfig")(IDS)
    finally:
        ab.register()
    with pytest.raises(ValueError, match="there are the backends"):
        ab.register(options={"NOPE": {}})


def test_compilers_stop_before_attention() -> None:
    """Or they would keep what was planned in their first trace."""
    model, ids = tiny("LlamaConfig", num_hidden_layers=1), IDS.repeat(2, 1)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    wanted = model(ids, attention_mask=mask, use_cache=False).logits
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(ids, attention_mask=mask, use_cache=False).logits, wanted)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="attn_backends plans steps in Python, between graphs"):
        torch.compile(model, backend="eager", fullgraph=True)(ids, attention_mask=mask, use_cache=False)
    torch._dynamo.reset()


def test_other_models_are_left_alone() -> None:
    """Registered names change nothing for a model that has another."""
    model = tiny_model("llama")
    out = model.generate(IDS, max_new_tokens=2, return_dict_in_generate=True, eos_token_id=None)
    assert type(out.past_key_values) is transformers.DynamicCache
