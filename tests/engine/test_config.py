"""Settings: defaults, files, environment, overrides, and what is said when they are wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

import attn_backends
from attn_backends.engine.config import EngineConfig, SamplingParams, parse_bytes
from attn_backends.engine.config_sources import OF_ADAPTERS, PREFIX, load_config
from attn_backends.validation import ConfigError, sections

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def refused(*args: object, **kwargs: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(*args, **{"environ": {}} | kwargs)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("word", ["off", "on", "compile"])
def test_accelerate_is_the_word_that_was_written(tmp_path: Path, word: str) -> None:
    """YAML reads on and off as true and false."""
    from_file = load_config(write(tmp_path, f"accelerate: {word}"), environ={})
    from_environment = load_config(environ={"ATTN_BACKENDS_ACCELERATE": word})
    from_option = load_config(None, {"accelerate": word}, {})
    assert from_file.accelerate == from_environment.accelerate == from_option.accelerate == word


def test_accelerate_refuses_other_words_and_the_keys_it_took_the_place_of(tmp_path: Path) -> None:
    assert "accelerate (from file" in refused(write(tmp_path, "accelerate: onn"))
    assert "got 'onn'; allowed: 'off', 'on' or 'compile'" in refused(write(tmp_path, "accelerate: onn"))
    assert "unknown key; did you mean accelerate?" in refused(write(tmp_path, "acelerate: on"))
    for old in ("pack_linears: true", "fuse_layers: true", "merge_projections: true", "compile: model"):
        assert "unknown key; " in refused(write(tmp_path, old))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_preset_loads(path: Path) -> None:
    assert load_config(path, environ={})


def test_cpu_preset_lists_every_key_with_its_default() -> None:
    cpu = load_config(Path(__file__).parents[2] / "configs" / "cpu.yaml", environ={})
    assert cpu == EngineConfig(device="cpu")
    assert cpu.model_fields_set == set(EngineConfig.model_fields) - {"backend_options"}
    for section in (cpu.cache, cpu.scheduler, cpu.sampling):
        assert section.model_fields_set == set(type(section).model_fields)


def test_sources_override_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, "backend: FILE\nseed: 1\ncache: {page_size: 8, layout: HND}\nscheduler:\n")
    environ = {"ATTN_BACKENDS_CACHE__PAGE_SIZE": "32", "ATTN_BACKENDS_BACKEND": "ENVIRON", "PATH": "/bin"}
    config = load_config(path, {"backend": "OPTION", "cache.num_pages": 5, "seed": None}, environ)
    assert (config.backend, config.seed) == ("OPTION", 1)
    assert (config.cache.page_size, config.cache.layout, config.cache.num_pages) == (32, "HND", 5)
    assert config.scheduler == EngineConfig().scheduler


def test_environment_is_read_on_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_BACKENDS_SAMPLING__STOP", '["a", "b"]')
    monkeypatch.setenv("ATTN_BACKENDS_SCHEDULER__MAX_MODEL_LEN", "null")
    assert load_config().sampling.stop == ("a", "b")
    monkeypatch.setenv("ATTN_BACKENDS_SAMPLING__STOP", "end")
    assert load_config().sampling.stop == ("end",)


def test_variables_that_adapters_read_are_no_settings() -> None:
    """Every name with the prefix that the package's sources have."""
    package = Path(attn_backends.__file__).parent
    sources = "".join(file.read_text() for file in package.rglob("*.py"))
    named = {name for name in re.findall(r'"(ATTN_BACKENDS_[A-Z_]*)"', sources) if name != PREFIX}
    assert named == OF_ADAPTERS
    assert load_config(environ=dict.fromkeys(named, "1")) == load_config(environ={})


@pytest.mark.parametrize("name", ["max_num_requests", "max_num_tokens"])
def test_sizes_that_no_device_has_are_refused(name: str) -> None:
    assert f"scheduler.{name} (from option scheduler.{name}): got 10000000000; allowed: less than" in refused(
        None, {f"scheduler.{name}": 10**10}
    )


def test_backend_options_merge_by_key_and_keep_their_values(tmp_path: Path) -> None:
    path = write(tmp_path, "backend_options: {workspace: {a.b: 1, empty: {}}, splits: 2}")
    config = load_config(path, environ={"ATTN_BACKENDS_BACKEND_OPTIONS__SPLITS": "4"})
    assert config.backend_options == {"workspace": {"a.b": 1, "empty": {}}, "splits": 4}


@pytest.mark.parametrize(
    ("size", "expected"), [(7, 7), ("7", 7), ("512MiB", 512 << 20), ("1.5 gib", 3 << 29), ("2GB", 2 * 10**9)]
)
def test_sizes(size: object, expected: int) -> None:
    assert parse_bytes(size) == expected


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "+1e-3", "0.1e-2", "1.e-3", ".1e-2", "0.001"])
def test_numbers_with_an_exponent_are_numbers(text: str) -> None:
    """YAML 1.1 takes those without a point for text."""
    assert load_config(environ={"ATTN_BACKENDS_CACHE__K_SCALE": text}).cache.k_scale == 0.001


@pytest.mark.parametrize("text", ["e3", "1e", "1e3x", "a1e3", "1e+", "'1e3'", "1e3.5", "1 e3", ".e3"])
def test_text_that_is_no_number_stays_text(text: str) -> None:
    assert load_config(environ={"ATTN_BACKENDS_MODEL": text}).model == text.strip("'")


@pytest.mark.parametrize("size", [0, -1, True, 1.5, None, "", "3 apples", "GiB", "0B", "-1MB", "1e3MB"])
def test_sizes_refused(size: object) -> None:
    with pytest.raises(ValueError, match="512MiB"):
        parse_bytes(size)


def test_every_problem_is_named_with_path_source_and_what_is_allowed(tmp_path: Path) -> None:
    path = write(tmp_path, "cache: {page_sise: 8, layout: NDH}\nscheduler: 5\nmax_tokens: 3\n")
    environ = {"ATTN_BACKENDS_BACKND": "TORCH", "ATTN_BACKENDS_SCHEDULER__MAX_NUM_TOKENS": "9"}
    message = refused(path, {"sampling.top_p": 2}, environ=environ)
    for line in (
        f"cache.page_sise (from file {path}): unknown key; did you mean cache.page_size? (allowed here: calculate_",
        f"cache.layout (from file {path}): got 'NDH'; allowed: 'NHD' or 'HND'",
        f"scheduler (from file {path}): got 5; allowed: a valid dictionary",
        f"max_tokens (from file {path}): unknown key; did you mean sampling.max_tokens",
        "backnd (from environment variable ATTN_BACKENDS_BACKND): unknown key; did you mean backend?",
        "sampling.top_p (from option sampling.top_p): got 2; allowed: less than or equal to 1",
    ):
        assert line in message


def test_an_override_is_blamed_rather_than_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "cache: {page_size: 8}")
    assert "cache.page_size (from option cache.page_size): got 0" in refused(path, {"cache.page_size": 0})
    assert "cache (from environment variable ATTN_BACKENDS_CACHE)" in refused(
        path, environ={"ATTN_BACKENDS_CACHE": "3"}
    )


def test_unreadable_files(tmp_path: Path) -> None:
    assert "near it: config.yaml" in refused(write(tmp_path, "").with_name("confg.yaml"))
    assert "configs/cpu.yaml" in refused(tmp_path / "other" / "x.yaml")
    assert "Is a directory" in refused(tmp_path)
    assert "not valid YAML" in refused(write(tmp_path, "a: [1"))
    assert "line 1" in refused(write(tmp_path, "a: [1"))
    twice = refused(write(tmp_path, "seed: 1\ncache:\n  page_size: 16\n  page_size: 32\n"))
    assert "page_size is given twice, first in line 3: keep one of them" in twice
    assert "seed is given twice" in refused(environ={"ATTN_BACKENDS_CACHE": "{seed: 1, seed: 2}"})
    assert "['a']; allowed: settings" in refused(write(tmp_path, "- a"))
    assert "ATTN_BACKENDS_SEED='{' is not a YAML value" in refused(environ={"ATTN_BACKENDS_SEED": "{"})
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot read config file" in refused(tmp_path / "config.yaml")
    assert load_config(write(tmp_path, "# nothing"), environ={}) == EngineConfig()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0}, {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")},
        {"top_k": 0}, {"top_p": 0}, {"top_p": 1.01}, {"stop": ""}, {"stop": ("a", "")}, {"stop_token_ids": (-1,)},
        {"max_token": 3},
    ],
    ids=str,
)  # fmt: skip
def test_sampling_values_out_of_range(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)not valid:.*{next(iter(wrong))}"):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_models_are_frozen_and_every_key_has_a_description() -> None:
    with pytest.raises(ValidationError):
        EngineConfig().seed = 3  # type: ignore[misc]
    models: list[type[BaseModel]] = [model for _, model in sections(EngineConfig)]
    assert [f"{m.__name__}.{k}" for m in models for k, field in m.model_fields.items() if not field.description] == []
