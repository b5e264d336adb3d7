"""What every part of the kit stands on: the backend under test, plain layers, batches, and the two fair outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from attn_backends.batch.views import without_new_keys
from attn_backends.interface.capabilities import Capabilities, Unsupported
from attn_backends.registry import get_backend, select_backend
from attn_backends.registry.table import BackendImportError
from attn_backends.spec import AttentionSpec
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.cases import BatchShape, load_cases
from attn_backends.testing.cases.features import FLOATS, Feature, plain_cache, plain_spec, undeclared
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import Backend, Result, assert_step, make_layer, run_backend

WHOLE_PROMPTS = BatchShape(seq_lens=(1, 17, 40), query_lens=(1, 17, 40))


class KitBase:
    """Settings and helpers. A subclass overrides `make_spec` if its plain layer needs other shapes."""

    backend_name: ClassVar[str]  # as registered
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[torch.dtype, ...] | None] = None  # to test with; None: every float that is declared

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """A case with a `dtype` argument runs once for each dtype."""
        if "dtype" in metafunc.fixturenames:
            try:
                dtypes = self.tested_dtypes
            except BackendImportError:  # every case is skipped, with the reason
                dtypes = FLOATS[:1]
            metafunc.parametrize("dtype", dtypes, ids=lambda dtype: str(dtype).removeprefix("torch."))

    @pytest.fixture(autouse=True)
    def _hardware(self) -> None:
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            pytest.skip(f"no CUDA device here; {self.backend_name} is to be tested on {self.device}")
        try:
            self.backend.get_name()
        except BackendImportError as error:
            if not isinstance(error.__cause__, ModuleNotFoundError):
                raise
            pytest.skip(str(error))

    @property
    def backend(self) -> Backend:
        return get_backend(self.backend_name)

    @property
    def can(self) -> Capabilities:
        return self.backend.capabilities()

    @property
    def tested_dtypes(self) -> tuple[torch.dtype, ...]:
        return self.dtypes or tuple(dtype for dtype in FLOATS if dtype in self.can.dtypes)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of cases that are not about dtypes."""
        return self.tested_dtypes[0]

    @property
    def lse_modes(self) -> tuple[bool, ...]:
        """Whether to ask for the LSE: without, and with if it is declared. Backends take other roads for the two."""
        return (False, True) if self.can.lse else (False,)

    @property
    def page_size(self) -> int:
        return plain_cache(self.can).page_size

    def make_spec(self, **changes: Any) -> AttentionSpec:
        """The plain layer, changed."""
        return plain_spec(self.can, **{"dtype": self.dtype, **changes})

    def feature_spec(self, feature: Feature, **changes: Any) -> AttentionSpec:
        return self.make_spec(**feature.spec_changes(self.make_spec(**changes).num_qo_heads), **changes)

    def make_batch(self, spec: AttentionSpec, shape: BatchShape | str, **how: Any) -> Batch:
        """A random batch for the layer, in one of the shapes of `cases.json` (by name) or another."""
        shape = load_cases().batches[shape] if isinstance(shape, str) else shape
        plain = plain_cache(self.can)
        how = {"page_size": plain.page_size, "layout": plain.layout, "device": self.device,
               "fp8_queries": self.can.fp8_queries, **how}  # fmt: skip
        return random_batch(self.backend, spec, shape.seq_lens, shape.query_lens, **how)

    def serves(self, spec: AttentionSpec, *, may_refuse: bool = False, **cache_changes: Any) -> bool:
        """Whether the backend serves such a layer. False only after its refusal was found to be in order.

        What `capabilities()` does not declare must be refused by name; what it declares must be served, unless
        `may_refuse` says that this case combines things, which a table of sets cannot promise.
        """
        cache = replace(plain_cache(self.can), **cache_changes)
        missing = undeclared(self.backend, spec, cache, self.device)
        found = self.backend.reject(spec, cache, self.device)
        unnamed = missing - {rejection.code for rejection in found}
        assert not unnamed, f"{self.backend_name} does not declare {sorted(unnamed)} and does not refuse it either"
        if not found:
            return True
        assert missing or may_refuse, f"{self.backend_name} declares all of this and refuses it: {found}"
        for rejection in found:
            assert all(vars(rejection).values()), f"a reason lacks code, got, supported or hint: {rejection!r}"
        with pytest.raises(Unsupported) as refusal:
            select_backend(self.backend_name, [spec], cache, self.device)
        told = {rejection.code for rejection in refusal.value.rejections}
        assert missing <= told, f"selection refuses without naming {sorted(missing - told)}"
        return False

    def check(self, spec: AttentionSpec, shapes: Sequence[BatchShape | str], what: str = "", **how: Any) -> None:
        """Batches of these shapes equal the reference, with and without the LSE, and so does what they write."""
        for shape in shapes:
            self.check_batch(self.make_batch(spec, shape, **how), f"{what} {shape}".strip())

    def check_batch(self, batch: Batch, what: str, **how: Any) -> None:
        """The same of one batch, run so (see `run_backend`)."""
        expected, pool = batch.expected(), batch.pool_after()
        for want_lse in self.lse_modes:
            result = run_backend(self.backend, batch, want_lse=want_lse, **how)
            assert_step(result, batch, f"{what}{' with lse' if want_lse else ''}", expected, pool)

    def check_cached_keys(self, shape: BatchShape | str) -> None:
        """A step without new keys reads all that it attends to from the cache, and writes nothing."""
        batch = self.make_batch(self.make_spec(), shape)
        layer, pool = make_layer(self.backend, batch), batch.pool_after()
        step = layer.state.begin_forward(layer.builder.build(0, without_new_keys(batch.common())))
        output = layer.impl.forward(batch.query, None, None, pool, step)
        assert_step(Result(output, None, pool), batch, f"{shape}, keys that are cached already")

    def served(self, features: Sequence[Feature], **changes: Any) -> Iterator[tuple[Feature, AttentionSpec]]:
        """The features that the backend serves, with their layers; the others have refused in order."""
        for feature in features:
            spec = self.feature_spec(feature, **changes)
            if self.serves(spec, may_refuse=len(feature.needs) > 1):
                yield feature, spec
