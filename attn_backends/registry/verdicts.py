"""What the registry answers: verdicts with reasons, the selection, the explanation. Plain data."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from attn_backends.registry.table import get_backend

if TYPE_CHECKING:
    from attn_backends.interface import AttentionBackend
    from attn_backends.interface.capabilities import Rejection
    from attn_backends.spec import KVCacheSpec


@dataclass(frozen=True)
class LayerRejection:
    """A reason to refuse, and the layers that it holds for."""

    rejection: Rejection
    layers: tuple[Hashable, ...]

    def __str__(self) -> str:
        names = ", ".join(map(str, self.layers[:4])) + (", …" if len(self.layers) > 4 else "")
        return f"{self.rejection} (layers {names})" if len(self.layers) > 1 else f"{self.rejection} (layer {names})"


@dataclass(frozen=True)
class Verdict:
    """What one backend says to some layers on a device."""

    name: str
    priority: int | None
    rejections: tuple[LayerRejection, ...] = ()
    import_error: str | None = None
    is_candidate: bool = True  # of AUTO: False for the MLA family where all layers are plain, and for others in MLA
    cache: KVCacheSpec | None = None  # the first of those given that it serves, None: it serves none

    @property
    def usable(self) -> bool:
        return self.cache is not None

    @property
    def reasons(self) -> list[str]:
        """Why it is not usable, in words."""
        return [self.import_error] if self.import_error else [str(rejection) for rejection in self.rejections]


@dataclass(frozen=True)
class Selection:
    """The backend to use. Pickles by name: another process imports or registers the backend itself."""

    name: str
    backend: type[AttentionBackend]
    cache: KVCacheSpec  # the first of those given that it serves
    verdicts: tuple[Verdict, ...]  # of every backend that was asked, the chosen one last
    reason: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _selection, (self.name, self.cache, self.verdicts, self.reason)


@dataclass(frozen=True)
class Explanation:
    """`select_backend` as data, with the verdict of every known backend."""

    asked: str
    verdicts: tuple[Verdict, ...]
    chosen: str | None  # None: refused
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        rows = [
            {
                "name": verdict.name,
                "usable": verdict.usable,
                "page_size": verdict.cache and verdict.cache.page_size,
                "priority": verdict.priority,
                "import_error": verdict.import_error,
                "rejections": [asdict(found.rejection) | {"layers": [*found.layers]} for found in verdict.rejections],
            }
            for verdict in self.verdicts
        ]
        return {"asked": self.asked, "chosen": self.chosen, "reason": self.reason, "backends": rows}


def _selection(name: str, cache: KVCacheSpec, verdicts: tuple[Verdict, ...], reason: str) -> Selection:
    return Selection(name, get_backend(name), cache, verdicts, reason)
