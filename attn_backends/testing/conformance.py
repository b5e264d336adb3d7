"""The conformance kit: one class that any backend passes, ours or a third party's. Needs pytest.

    from attn_backends.testing.conformance import BackendConformance

    class TestMine(BackendConformance):
        backend_name = "MINE"

It drives a backend through the interface alone and compares with the float64 reference. A case is never skipped, except
for want of hardware: a feature that `capabilities()` does not declare must be refused, which is checked instead.
"""

from __future__ import annotations

from attn_backends.testing.kit.building import Building
from attn_backends.testing.kit.contract import Contract
from attn_backends.testing.kit.defaults import Defaults
from attn_backends.testing.kit.latent import Latent
from attn_backends.testing.kit.logits import Logits
from attn_backends.testing.kit.mixed import Mixed
from attn_backends.testing.kit.numerics import Numerics, Scales
from attn_backends.testing.kit.refusals import Refusals
from attn_backends.testing.kit.visibility import Visibility


class BackendConformance(Numerics, Scales, Logits, Visibility, Contract, Defaults, Building, Mixed, Refusals):
    """Subclass it, name the backend, and run pytest.

    Attributes:
        backend_name: as registered.
        device: where to run; "cpu" if not given. "cuda" skips where there is none.
        dtypes: of queries and outputs; every declared one of float32, float16, bfloat16 and float64 if not given.
            Cases that are not about dtypes use the first.

    A backend whose plain layer has a shape of its own overrides `make_spec(**changes)`.
    """


class MLAConformance(Latent, BackendConformance):
    """The same for a backend of the MLA family: `Capabilities.mla`.

    `Latent` asks for heads and widths as MLA has them, in the place of the cases that are set to None here.
    """

    test_heads = None  # type: ignore[assignment]
    test_head_dims = None  # type: ignore[assignment]
    test_unequal_head_dims = None  # type: ignore[assignment]
    test_interleaved_caches = None  # type: ignore[assignment]
