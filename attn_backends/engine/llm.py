"""`LLM`: prompts in, text out. Loads a model, chooses the backend, and runs scheduler, runner and sampler in turn."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from attn_backends.cache.kv_cache import page_bytes
from attn_backends.engine.calls import ChunkCall, Chunks, Launch, launched
from attn_backends.engine.config import EngineConfig, SamplingParams
from attn_backends.engine.live import Detokenizer, LiveRequest, LiveRequests
from attn_backends.engine.models.kv_scales import kv_scales
from attn_backends.engine.models.load import check_acceleration, load_model
from attn_backends.engine.models.loaded_model import LoadedModel
from attn_backends.engine.outputs import Prompt, Report, RequestOutput, Stats, TextChunk, silent
from attn_backends.engine.page_allocator import PageAllocator
from attn_backends.engine.prompts import check_prompts, check_sampling, render_prompt, why_not_served, why_not_text
from attn_backends.engine.request import Request, salts_for
from attn_backends.engine.resolve import (
    check_backend,
    choose_backend,
    longest_request,
    pool_for,
    resolve_device,
    with_cache_dtype,
)
from attn_backends.engine.runner import ModelRunner
from attn_backends.engine.sampler import NOT_FINITE, Sampler
from attn_backends.engine.scheduler import Scheduler
from attn_backends.engine.warm_up import make_ready
from attn_backends.graphs.recorder import GraphRecorder
from attn_backends.registry import validate_options
from attn_backends.spec import Limits

_Given = tuple[Prompt, SamplingParams, str | None]  # the last is a salt


class LLM:
    """A model on a paged KV cache. Make one with `from_pretrained`.

    >>> llm = LLM.from_pretrained("smollm2-135m-instruct")  # doctest: +SKIP
    >>> llm.generate(["The capital of France is"])[0].text  # doctest: +SKIP
    """

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        device: torch.device,
        report: Report = silent,
        recorder: GraphRecorder | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.stats = Stats()
        self._live = LiveRequests()
        self._call = ChunkCall()
        self._is_in_order = True  # no call has left requests, pages or rows behind
        specs = {layer: with_cache_dtype(probe.spec, config) for layer, probe in model.layers.items()}
        max_model_len = longest_request(config, model.max_model_len)
        self.selection = choose_backend(config, specs, max_model_len, device)
        backend, cache = self.selection.backend, pool_for(config, specs, self.selection, device)
        options = validate_options(self.selection.name, config.backend_options)
        self.kv_bytes_per_token = page_bytes(backend, specs, replace(cache, num_pages=1)) // cache.page_size
        # What keys and values of every head take: where latent rows are cached instead, more than that.
        self.expanded_kv_bytes_per_token = sum(
            s.num_kv_heads * (s.head_dim + s.head_dim_vo) * s.cache_dtype.itemsize for s in specs.values()
        )
        limits = Limits(config.scheduler.max_num_requests, config.scheduler.max_num_tokens, max_model_len)
        self.allocator = PageAllocator(cache.pages, cache.page_size, config.cache.prefix_caching)
        self.scheduler = Scheduler(config.scheduler, self.allocator, max_model_len)
        self.runner = ModelRunner(
            model, backend, specs, cache, limits, device,
            scales=kv_scales(config.cache, specs, model.folder), options=options, report=report,
        )  # fmt: skip
        self.scheduler.on_release = self.runner.forget
        self.scheduler.on_finish = self._live.end
        self.sampler = Sampler(config.seed)
        make_ready(self.runner, self.sampler, config, limits, self.allocator.num_pages, report, recorder)
        # A GPU goes on with the next batch while the host looks at the last one's tokens; on a CPU there is no "while".
        self.launches_ahead = device.type != "cpu"
        self._num_requests = 0

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        config: EngineConfig | None = None,
        report: Report = silent,
        recorder: GraphRecorder | None = None,
    ) -> LLM:
        """Load a model and everything around it.

        Args:
            model: the built-in default's name, a Hugging Face folder or a GGUF file; None: `config.model`.
            config: settings; None for the defaults.
            report: takes in words what is being loaded.
            recorder: captures `config.graphs`; None: CUDA graphs, on a GPU alone.

        Raises:
            ConfigError: `config.accelerate` is for GPUs, and the device is a CPU.
            UnknownBackendError, BackendImportError: no backend has the configured name, or it cannot be imported.
            ModelError: the model cannot be loaded, or would not run right on a paged cache.
            Unsupported: the named backend cannot serve the model's layers; the reasons are in it.
        """
        config = EngineConfig() if config is None else config
        if not isinstance(config, EngineConfig):
            raise TypeError(f"config is {config!r}; pass an EngineConfig: load_config(path), or EngineConfig(…)")
        if model is not None:
            config = config.model_copy(update={"model": str(model)})
        device = resolve_device(config.device)
        check_acceleration(config.accelerate, device)
        check_backend(config, device)
        loaded = load_model(config, device, report)
        report("setting up the engine")
        return cls(config, loaded, device, report, recorder)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Texts for all prompts, in their order, batched continuously.

        Args:
            prompts: texts or token ids.
            sampling: for all, or one a prompt; None: `config.sampling`.
            cache_salt: for all, or one a prompt; prompts find each other's prefixes under equal salts alone, and those
                without one find each other's.

        A prompt that cannot be served, or whose logits are not finite at some token, has `finish_reason` "error" and
        says why; the others are not touched by it.

        Raises:
            TypeError: `prompts` is no list, a prompt no text or list of token ids, or `sampling` no `SamplingParams`.
            ValueError: there are not as many sampling parameters as prompts.
        """
        chunks = self._begun(self._checked(prompts, sampling, cache_salt), in_pieces=False)
        try:
            return sorted((chunk.output for chunk in chunks if chunk.output), key=lambda output: output.index)
        finally:
            chunks.close()

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
    ) -> Iterator[TextChunk]:
        """The same, by pieces as tokens are made; errors come at once. Closing the iterator early aborts what runs."""
        return self._begun(self._checked(prompts, sampling, cache_salt), in_pieces=True)

    def _checked(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        cache_salt: str | Sequence[str | None] | None,
    ) -> list[_Given]:
        prompts = check_prompts(prompts)
        params = check_sampling(sampling, self.config.sampling, len(prompts))
        return [*zip(prompts, params, salts_for(cache_salt, len(prompts)), strict=True)]

    def _begun(self, given: Sequence[_Given], *, in_pieces: bool) -> Chunks:
        call = ChunkCall()
        return call.of(self._chunks(call, given, in_pieces))

    def _chunks(self, call: ChunkCall, given: Sequence[_Given], in_pieces: bool) -> Chunks:
        """`stream`; if not `in_pieces`, whole texts where nothing needs to be found in them on the way."""
        if self._live and self._call.goes_on:
            raise RuntimeError("this LLM is already streaming: exhaust or close that iterator first")
        if not self._is_in_order:  # the last call was interrupted as it ended, or is held at its last chunk
            self._drop_all()
        self._call, self._is_in_order = call, False
        started = time.perf_counter()
        self.stats = Stats(num_prompts=len(given), num_pages=self.allocator.num_pages)
        before = self._counters()
        self.allocator.reset_peak()
        try:
            self._admit(given, in_pieces)
            yield from self._live.take_finished()
            launch: Launch | None = None
            while self._call is call and self._live:  # at the end, what still runs ahead is for nobody
                launch = yield from self._step(launch or self._begin())
                self.stats.seconds = time.perf_counter() - started
            self._is_in_order = self._is_in_order or self._call is call
        except GeneratorExit:  # what was computed so far can still be found by later prompts
            for item in self._live if self._call is call else ():
                self.scheduler.abort(item.request.request_id)
            raise
        finally:
            if self._call is call and not self._is_in_order:
                self._drop_all()
            hits, preemptions, replays = (now - then for now, then in zip(self._counters(), before, strict=True))
            self.stats.num_prefix_hit_tokens, self.stats.num_preemptions = hits, preemptions
            self.stats.num_graph_steps = replays
            self.stats.peak_pages = self.allocator.peak_used
            self.stats.seconds = time.perf_counter() - started

    def _drop_all(self) -> None:
        """Forget all requests and give back all pages and rows, whatever was interrupted; if this is, once more."""
        try:
            self._drop()
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        self.scheduler.drop_all()
        self.runner.forget_all()
        self._live.clear()
        self._is_in_order = True

    def render_prompt(self, text: str, chat: bool | None = None) -> Prompt:
        """A user's message as the model wants it: wrapped in its chat template, or as it is.

        Args:
            chat: None wraps if the model has a template. An empty text is never wrapped, and fails as a prompt; so is
                one that is no valid text.

        Raises:
            TypeError: `text` is no text.
            ValueError: `chat` is True and the model has no template.
        """
        return render_prompt(self.model.tokenizer, text, chat)

    def abort(self, index: int) -> None:
        """End one prompt of the running `stream` early; its last chunk then comes with `finish_reason` "abort"."""
        for item in self._live:
            if item.index == index:
                self.scheduler.abort(item.request.request_id)

    def _admit(self, given: Sequence[_Given], in_pieces: bool) -> None:
        for index, (prompt, params, salt) in enumerate(given):
            error = why_not_text(prompt) if isinstance(prompt, str) else None
            token_ids: list[int] = []
            if not error:
                token_ids = self.model.tokenizer(prompt).input_ids if isinstance(prompt, str) else list(prompt)
            error = error or why_not_served(token_ids, params, self.model.vocab_size)
            request = Request(str(self._num_requests), token_ids, params, cache_salt=salt)
            self._num_requests += 1
            item = LiveRequest(index, prompt, request, Detokenizer(self.model.tokenizer, params.stop))
            self._live.add(item, is_streaming=in_pieces or bool(params.stop))
            if error:
                self.scheduler.refuse(request, error)
            else:
                self.scheduler.add(request)
            self.stats.num_prompt_tokens += len(token_ids)

    def _step(self, launch: Launch | None) -> Generator[TextChunk, None, Launch | None]:
        """Wait for what a launch sampled, and hand it out. Returns the launch that follows, if one does."""
        ahead = self._follow(launch) if launch and self.launches_ahead else None
        if launch:
            for tokens, lost in launch.tokens.wait():
                for row in lost:
                    self.scheduler.fail(launch.sampled[row], NOT_FINITE)
                streaming = self._live.streaming(launch.sampled, tokens)
                before = self.scheduler.num_new_tokens
                self.scheduler.update(launch.batch, tokens, self.model.eos_token_ids)
                self.stats.num_new_tokens += self.scheduler.num_new_tokens - before
                for item, token in streaming:
                    text = item.add(token)
                    if item.detokenizer.stopped:
                        self.scheduler.finish(item.request, "stop")
                    if text:
                        yield TextChunk(item.index, text)
        yield from self._live.take_finished()
        return ahead or (self._follow(launch) if launch and not self.launches_ahead else None)

    def _begin(self) -> Launch | None:
        """Launch what the scheduler chooses; None if all that live have ended."""
        batch = self.scheduler.schedule()
        if batch is None:
            if not self._live.have_ended:
                raise RuntimeError(
                    f"{len(self._live)} requests have not ended and none can run, with {self.allocator.num_used} of "
                    f"{self.allocator.num_pages} pages in use: this is a fault of the engine; its requests are dropped"
                )
            return None
        batch = self.runner.arrange(batch)
        return launched(self.runner, self.sampler, self.stats, batch, self.runner.run(batch))

    def _follow(self, launch: Launch) -> Launch | None:
        """Launch the same rows, each one token further, if the scheduler need not choose anew."""
        batch = self.scheduler.follow(launch.batch) if self.runner.can_follow else None
        if batch is None:
            return None
        self.runner.grow(batch)
        return launched(self.runner, self.sampler, self.stats, batch, self.runner.run_next(launch.last_tokens))

    def _counters(self) -> tuple[int, int, int]:
        return self.scheduler.num_prefix_hit_tokens, self.scheduler.num_preemptions, self.runner.num_replays
