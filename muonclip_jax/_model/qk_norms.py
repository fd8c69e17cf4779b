"""Norms of query and key after their projection, known by their names."""

import functools
import re
from collections.abc import Iterable, Sequence

from .paths import Path


_QK = "(query|q|key|k|qk|querykey|queries|keys)"
_NORM = (
    "(head|layer|group|rms|l|ln)*(norm|ln|normali[sz]ation|normali[sz]e|normali[sz]er)"
)
_QK_NORM = re.compile(f"{_QK}{_NORM}(layer|scale|gain|weight|fn)*|{_NORM}(added)?{_QK}")

# In latent attention, a norm of the query's latent, before its up-projection.
_OF_LATENT = re.compile(f"q{_NORM}|{_NORM}q")


class QKNorms:
    """The children that bear such a name, by module."""

    def __init__(self, paths: Iterable[Path]):
        self._names: dict[Path, list[str]] = {}
        for path in paths:
            for depth, name in enumerate(path):
                if _is_qk_norm(name):
                    self._names.setdefault(path[:depth], []).append(name)

    def beside(self, layer: Path, leaves: Sequence[Path], *, latent: bool) -> list[str]:
        """Those beside the projections of a layer that are not among its own leaves."""
        if not self._names:
            return []
        modules = {path[:n] for path in leaves for n in range(len(layer), len(path))}
        own = {path[:n] for path in leaves for n in range(len(path) + 1)}
        return sorted(
            {
                name
                for module in modules
                for name in self._names.get(module, ())
                if (*module, name) not in own
                and not (latent and _OF_LATENT.fullmatch(_letters(name)))
            }
        )


@functools.lru_cache(maxsize=4096)
def _is_qk_norm(name: str) -> bool:
    """Whether a name is one of these in any spelling: `q_norm`, `KeyLayerNorm_0`."""
    return bool(_QK_NORM.fullmatch(_letters(name)))


def _letters(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.lower())
