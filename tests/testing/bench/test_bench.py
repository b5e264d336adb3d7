"""`attn-backends bench`: loads within limits, checks before times, rounds within their time, over a test's clock."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, KVCacheSpec, MLASpec, get_backend, register_backend
from attn_backends.backends.torch.impl import TorchImpl
from attn_backends.registry import Load, backends, explain
from attn_backends.testing.bench.chart import draw_times
from attn_backends.testing.bench.loads import LoadCase, bytes_per_key, cases, read_layers
from attn_backends.testing.bench.measure import FEWEST_ROUNDS, MOST_ROUNDS, Bench, Contender, Measurement, make_clock
from attn_backends.validation import ConfigError

sys.path.append(str(Path(__file__).parents[3] / "examples" / "plugin"))
import attn_backends_naive as naive  # it registers NAIVE

CPU, SPEC = torch.device("cpu"), AttentionSpec(4, 2, 32)
DECODE, PROMPT = LoadCase("decode", Load(3, 20)), LoadCase("prefill", Load(2, 9))


class Clock:
    """Seconds that pass with every call, and microseconds that a call is said to take."""

    def __init__(self, us: float = 7.0, seconds: float = 0.0) -> None:
        self.us, self.seconds, self.at, self.calls = us, seconds, 0.0, 0

    def __call__(self, run: Any) -> float:
        run()
        self.calls += 1
        self.at += self.seconds
        return self.us + self.calls % 2

    def now(self) -> float:
        return self.at


def bench(*names: str, clock: Clock | None = None, seconds: float = 10.0) -> Bench:
    clock = clock or Clock()
    contenders = {name: Contender(get_backend(name), KVCacheSpec(None, 16)) for name in names}
    return Bench(contenders, CPU, seconds, clock, clock.now)


def test_loads_are_within_limits_and_of_both_phases() -> None:
    found = cases(max_model_len=2000, max_num_requests=100, most_tokens=4096, most_keys=100_000)
    assert len(set(found)) == len(found)
    assert {case.phase for case in found[:2]} == {"decode", "prefill"}
    for phase, load in found:
        assert load.num_keys <= 2000
        assert load.num_requests <= 100
        assert load.num_requests * load.num_keys <= (4096 if phase == "prefill" else 100_000)
    assert max(load.num_keys for _, load in found) == 2000
    assert max(load.num_requests for _, load in found) == 100
    assert cases(8, 1, 1000, 1000) == [LoadCase("decode", Load(1, 8)), LoadCase("prefill", Load(1, 8))]


def test_bytes_of_a_key() -> None:
    assert bytes_per_key(AttentionSpec(4, 2, 64, 32)) == 2 * (64 + 32) * 4
    assert bytes_per_key(MLASpec(16, dtype=torch.bfloat16)) == 576 * 2


@pytest.mark.parametrize("spec", [SPEC, AttentionSpec(4, 2, 32, sinks=True), MLASpec(4, head_dim=24, head_dim_vo=16,
                                  kv_lora_rank=32, qk_rope_head_dim=8)])  # fmt: skip
def test_every_load_is_run_as_asked(spec: AttentionSpec) -> None:
    name = "TORCH_MLA" if isinstance(spec, MLASpec) else "TORCH"
    found = list(bench(name).run([spec], [DECODE, PROMPT]))
    assert [each.case for each in found] == [DECODE, PROMPT]
    for each in found:
        assert each.failed == {}
        assert each.rounds == MOST_ROUNDS
        assert each.us[name] in (7.0, 7.5, 8.0)
        assert each.row().load == each.case.load


def test_tokens_are_those_of_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[int] = Counter()
    inner = TorchImpl.attend

    def attend(self: Any, query: Any, *args: Any) -> None:
        seen[len(query)] += 1
        inner(self, query, *args)

    monkeypatch.setattr(TorchImpl, "attend", attend)
    list(bench("TORCH").run([SPEC], [LoadCase("decode", Load(5, 20)), LoadCase("prefill", Load(2, 50))]))
    assert seen[5] > MOST_ROUNDS
    assert seen[100] > MOST_ROUNDS


def test_a_wrong_backend_has_no_time_and_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = naive.NaiveImpl.attend

    def wrong(self: Any, query: Any, key: Any, value: Any, kv_cache: Any, step: Any, output: Any, lse: Any) -> None:
        inner(self, query, key, value, kv_cache, step, output, lse)
        output *= 1.01

    monkeypatch.setattr(naive.NaiveImpl, "attend", wrong)
    (found,) = bench("TORCH", "NAIVE").run([SPEC], [DECODE])
    assert list(found.us) == ["TORCH"]
    assert "AssertionError: decode rows: output is off by" in found.failed["NAIVE"]


def test_a_backend_that_dies_leaves_the_others() -> None:
    class Dying(naive.NaiveState):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("no kernel\nfor this")

    class DyingBackend(naive.NaiveBackend):
        name, state_cls = "DYING", Dying

    register_backend("DYING", DyingBackend, override=True)
    found = list(bench("DYING", "TORCH").run([SPEC], [DECODE, PROMPT]))
    assert all(list(each.us) == ["TORCH"] for each in found)
    assert "RuntimeError: no kernel for this" in found[0].failed["DYING"]


def test_time_that_runs_out_leaves_a_load_of_each_phase() -> None:
    clock = Clock(seconds=1.0)
    loads = [DECODE, PROMPT, LoadCase("decode", Load(1, 20)), LoadCase("prefill", Load(1, 9))]
    found = list(bench("TORCH", clock=clock, seconds=5.0).run([SPEC], loads))
    assert [each.case for each in found] == [DECODE, PROMPT]
    assert all(each.rounds == FEWEST_ROUNDS for each in found)
    plenty = list(bench("TORCH", clock=Clock(seconds=1.0), seconds=80.0).run([SPEC], loads))
    assert [each.case for each in plenty] == loads
    assert all(FEWEST_ROUNDS < each.rounds < MOST_ROUNDS for each in plenty)


def test_a_much_slower_backend_has_one_round() -> None:
    """Its time counts, and the others have theirs."""

    class Uneven(Clock):
        def __call__(self, run: Any) -> float:
            before = seen["NAIVE"]
            run()
            return 5.0 if seen["NAIVE"] == before else 51.0

    seen: Counter[str] = Counter()

    class Seen(naive.NaiveImpl):
        def attend(self, *args: Any) -> None:
            seen["NAIVE"] += 1
            super().attend(*args)

    class SeenBackend(naive.NaiveBackend):
        name, impl_cls = "SEEN", Seen

    register_backend("SEEN", SeenBackend, override=True)
    (found,) = bench("SEEN", "TORCH", clock=Uneven()).run([SPEC], [DECODE])
    assert found.us == {"TORCH": 5.0, "SEEN": 51.0}
    assert found.rounds == MOST_ROUNDS
    assert seen["NAIVE"] == 3  # the check, the first call and one that is timed


@pytest.mark.gpu
def test_on_a_gpu_times_are_of_graphs_and_events() -> None:
    spec, device = AttentionSpec(8, 2, 128, dtype=torch.bfloat16), torch.device("cuda")
    contenders = {}
    for entry in (entry for entry in backends.values() if entry.priority is not None and entry.source == "built-in"):
        found = explain(entry.name, [spec], [KVCacheSpec(1, size) for size in (16, 64, 256)], device).verdicts
        cache = next(verdict.cache for verdict in found if verdict.name == entry.name)
        if cache is not None:
            contenders[entry.name] = Contender(get_backend(entry.name), cache)
    loads = [LoadCase("decode", Load(16, 2000)), LoadCase("prefill", Load(2, 1000))]
    for each in Bench(contenders, device, 20, make_clock(device)).run([spec], loads):
        assert each.failed == {}
        assert set(each.us) == set(contenders)
        assert all(1 < us < 1e5 for us in each.us.values())


def test_the_chart_is_svg_and_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = [Measurement(SPEC, DECODE, {"TORCH": 2.0, "NAIVE": 4.0}, 3), Measurement(SPEC, PROMPT, {}, 0)]
    svg, png = draw_times(found, "here", tmp_path / "new", "times")
    assert "3 decodes of 20, 4/2 heads of 32" in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")


def test_layers_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "layers.yaml"
    file.write_text(
        "layers:\n"
        "- {num_qo_heads: 8, num_kv_heads: 2, head_dim: 64, count: 3, window_left: 127}\n"
        "- {num_qo_heads: 16, head_dim: 192, head_dim_vo: 128, kv_lora_rank: 512, qk_rope_head_dim: 64}\n"
        "max_model_len: 999\n"
    )
    found = read_layers(file)
    assert found.max_model_len == 999
    assert found.layers[0].count == 3
    assert found.layers[0].spec(torch.float16) == AttentionSpec(8, 2, 64, window_left=127, dtype=torch.float16)
    assert found.layers[1].spec(torch.float32) == MLASpec(16)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("layers: []", "layers .from file .*: got"),
        ("layers: [{num_qo_heads: 0, head_dim: 64}]", "layers.0.num_qo_heads .from file .*got 0"),
        ("layers: [{head_dim: 64}]", "layers.0.num_qo_heads .*: missing"),
        ("3", "layers .*: missing"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "layers.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_layers(file)
    with pytest.raises(ValueError, match=r"cannot read --layers .*write, for one, layers:"):
        read_layers(tmp_path / "nothing.yaml")
