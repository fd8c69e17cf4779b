"""Norms of query and key after their projection, known by their names."""

import functools
import re
from collections.abc import Iterable, Sequence

from .._parameters.paths import Path


_QK = "(query|q|key|k|qk|querykey|queries|keys)"
_NORM = (
    "(head|layer|group|rms|l|ln)*(norm|ln|normali[sz]ation|normali[sz]e|normali[sz]er)"
)
_QK_NORM = re.compile(f"{_QK}{_NORM}(layer|scale|gain|weight|fn)*|{_NORM}(added)?{_QK}")

# In latent attention, norms before the up-projections of query, and of key and value.
_OF_LATENT = re.compile(f"q{_NORM}|{_NORM}q")
_OF_KEY_VALUE = re.compile(f"kv(a|b|c|lora|latent|compressed)*{_NORM}|{_NORM}kv")


class QKNorms:
    """The children that bear such a name, by module."""

    def __init__(self, paths: Iterable[Path]):
        self._names: dict[Path, list[str]] = {}
        self._latent: set[Path] = set()
        for path in paths:
            for depth, name in enumerate(path):
                if _is_qk_norm(name):
                    self._names.setdefault(path[:depth], []).append(name)
                elif _is_key_value_norm(name):
                    self._latent.add(path[:depth])

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
                and not (
                    (latent or module in self._latent)
                    and _OF_LATENT.fullmatch(_letters(name))
                )
            }
        )


@functools.lru_cache(maxsize=4096)
def _is_qk_norm(name: str) -> bool:
    """Whether a name is one of these in any spelling: `q_norm`, `KeyLayerNorm_0`."""
    return bool(_QK_NORM.fullmatch(_letters(name)))


@functools.lru_cache(maxsize=4096)
def _is_key_value_norm(name: str) -> bool:
    return bool(_OF_KEY_VALUE.fullmatch(_letters(name)))


def _letters(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.lower())
