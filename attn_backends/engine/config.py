"""The engine's settings: pydantic models. `config_sources.load_config` reads them."""

from __future__ import annotations

import operator
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from attn_backends.registry.phases import name_of
from attn_backends.validation import config_error


def _whole(value: object) -> object:
    """Integers, NumPy's too; nothing is rounded, and True is no number."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError("allowed: a whole number")
    return operator.index(value)


def _number(value: object) -> object:
    if isinstance(value, bool | str | bytes):
        raise ValueError("allowed: a number")
    return value


def _on_or_off(value: object) -> object:
    """What YAML reads as true and false, as the words that were written."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number)]
Text = Annotated[str, Field(min_length=1, strict=True)]
Positive = Annotated[Whole, Field(ge=1)]
MostRows = Annotated[Positive, Field(le=1 << 16)]  # buffers are sized by these: far above what one device serves
MostTokens = Annotated[Positive, Field(le=1 << 22)]
Scale = Annotated[Number, Field(gt=0, allow_inf_nan=False)]

_UNITS = {"b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def __init__(self, /, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise config_error(error, type(self), lambda path: f"{type(self).__name__}(…)") from error

    # Validation of a section inside another does not come by `__init__`, and names the whole path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def model_validate(cls, obj: Any, **how: Any) -> Self:
        """Settings from a mapping.

        Raises:
            ConfigError: names every problem and what is allowed.
        """
        try:
            return super().model_validate(obj, **how)
        except ValidationError as error:
            raise config_error(error, cls, lambda path: f"{cls.__name__}.model_validate") from error


class SamplingParams(_Settings):
    """How one request's next tokens are chosen, and when it ends."""

    max_tokens: Positive = 64
    """Most new tokens."""
    temperature: Annotated[Number, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Divides the logits before sampling; 0 is greedy: the most likely token, always."""
    top_k: Positive | None = None
    """Sample among this many most likely tokens; None is all."""
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Sample among the fewest most likely tokens whose probabilities reach this sum; 1 is all."""
    seed: Whole | None = None
    """The request's own seed: its tokens no longer depend on what it is batched with. None draws from the engine's."""
    stop: tuple[Text, ...] = ()
    """Strings that end the text; they are not part of it. One string may be given alone."""
    stop_token_ids: tuple[Annotated[Whole, Field(ge=0)], ...] = ()
    """Token ids that end the text, beside the model's own end token."""
    ignore_eos: bool = False
    """Run on to `max_tokens` past the model's end token, as benchmarks do."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_string_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class SchedulerConfig(_Settings):
    """How requests are batched into steps."""

    max_num_requests: MostRows = 64
    """Most requests that run in one step; the others wait."""
    max_num_tokens: MostTokens = 2048
    """Most query tokens in one step, over all requests."""
    max_model_len: Positive | None = None
    """Longest request, prompt and new tokens together; None is the model's own limit."""
    decode_steps_per_launch: Positive = 1
    """Decode steps that run before the host looks at tokens again: fewer round trips, text in larger pieces."""
    chunked_prefill: bool = True
    """Split a prompt over steps when it does not fit into one beside the requests that are decoding."""


class CacheConfig(_Settings):
    """The paged KV pool: allocated once, never grown."""

    page_size: Positive | None = None
    """Tokens a page holds; None: what the backend prefers, else 16, or the next larger size that it serves."""
    layout: Literal["NHD", "HND"] = "NHD"
    """Order in memory inside a page: tokens then heads, or heads then tokens."""
    dtype: Literal["auto", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"] = "auto"
    """What keys and values are stored in; auto is the model's dtype."""
    memory: int | str = "1GiB"
    """Bytes of the pool over all layers: a number, or text such as 512MiB (powers of 1024) or 2GB (of 1000)."""
    num_pages: Positive | None = None
    """Pages of the pool, in place of `memory`."""
    prefix_caching: bool = True
    """Keep the pages of finished requests and reuse them for a prompt that begins alike."""
    k_scale: Scale | None = None
    """Keys are stored divided by this, of every layer; None: the checkpoint's own scales for an fp8 cache, else 1."""
    v_scale: Scale | None = None
    """Values are stored divided by this, of every layer; None: the checkpoint's own scales for an fp8 cache, else 1."""

    calculate_kv_scales: bool = False
    """Work out every layer's two scales by one pass over a short text while the engine loads; they are constants from
    then on. For an fp8 cache, of a checkpoint that brings none."""

    @field_validator("calculate_kv_scales")
    @classmethod
    def _has_no_others(cls, value: bool, info: ValidationInfo) -> bool:
        dtype, given = info.data.get("dtype"), [name for name in ("k_scale", "v_scale") if info.data.get(name)]
        if value and (given or not str(dtype).startswith("float8")):
            found = " and ".join([f"dtype is {dtype}", *(f"{name} is set" for name in given)])
            raise ValueError(f"allowed: false, as {found}; true for an fp8 dtype without k_scale and v_scale")
        return value

    @field_validator("memory", mode="before")
    @classmethod
    def _readable(cls, value: object) -> object:
        parse_bytes(value)
        return value

    @property
    def memory_bytes(self) -> int:
        """`memory` as a number of bytes."""
        return parse_bytes(self.memory)


class GraphsConfig(_Settings):
    """CUDA graphs: a step captured once for each padded size, then replayed."""

    mode: Literal["auto", "none", "piecewise", "full"] = "auto"
    """full: a decode step as one graph; piecewise: any step, with attention between the graphs; none: eager.
    auto is full on a GPU if the backend can, else none."""
    sizes: tuple[Positive, ...] | None = None
    """Sizes that steps are padded to, rows of a full graph or tokens of a piecewise one. None: 1, 2, 4, 8, 12, 16, 24
    and so on in growing strides, to scheduler.max_num_requests."""
    query_lens: tuple[Positive, ...] = (1,)
    """Tokens a row that full graphs are captured for. More than 1 serves the verify steps of speculative decoding."""


class EngineConfig(_Settings):
    """Everything an engine is built from."""

    model: Text = "smollm2-135m-instruct"
    """The built-in default model, or a local Hugging Face folder."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """What weights and activations are computed in; auto leaves it to the model and the device."""
    device: Text = "auto"
    """A torch device such as cpu or cuda:0; auto is a GPU if there is one."""
    backend: Annotated[Text, BeforeValidator(name_of)] = "AUTO"
    """Attention backend by name, used or refused; or two by phase, {prefill: X, decode: Y}, over a cache that both
    accept. AUTO takes the first that serves every layer, by times that were measured on this device, or else by
    priority; `attn-backends explain` prints the order and the reasons."""
    backend_options: dict[str, Any] = {}
    """The backend's own options, checked by its own model; of two, those of each under prefill and decode."""
    trust_remote_code: bool = False
    """Run Python code that a model folder brings along."""
    seed: Whole = 0
    """Where random numbers start, for requests that bring no seed of their own."""
    accelerate: Annotated[Literal["off", "on", "compile"], BeforeValidator(_on_or_off)] = "on"
    """off: the model's own code runs as it is. on: decoder layers of the Llama form are fused, projections of one input
    (q, k, v; gate, up) are one product, and on a CPU weights are reordered once for its matmul library: faster, the
    same size, equal within rounding. compile, on a GPU alone: torch.compile makes graphs of the model's own code, in
    minutes at each start."""
    warm_up: bool = True
    """Compile every kernel that requests may need before the first one comes, and on a GPU run steps of every size:
    loading takes longer, cold caches a minute, and no request waits for it."""
    cache: CacheConfig = CacheConfig()
    """The KV pool."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Batching."""
    graphs: GraphsConfig = GraphsConfig()
    """CUDA graphs."""
    sampling: SamplingParams = SamplingParams()
    """Sampling parameters for requests that bring none of their own."""


def parse_bytes(size: object) -> int:
    """A number of bytes from an int or from text with a unit.

    >>> parse_bytes("512MiB"), parse_bytes("2GB")
    (536870912, 2000000000)
    """
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if isinstance(size, str) and size.strip().isdigit():
        size = int(size)
    if match and match[2].lower() in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2].lower()])
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError("allowed: a positive number of bytes, or text such as 512MiB, 1.5GiB or 2GB")
    return size
