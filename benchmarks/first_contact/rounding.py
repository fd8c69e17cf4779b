"""Which dtype the platform iterates in, and how far off it may be.

Bounds count units, the `eps` of a dtype. Sums of float32 are rounded at every term,
those of shorter dtypes are float32 and rounded once.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


#: Stated here again, for a check is no check if it reads what it checks.
DTYPES: dict[str, Any] = {"cpu": "float32", "gpu": "float16", "tpu": "bfloat16"}
_SUMS = {"float32": 8}


def platform() -> Any:
    return jax.default_backend()


def own_dtype() -> str:
    return DTYPES[platform()]


def units(count: float, dtype: str) -> float:
    return count * _SUMS.get(dtype, 1) * float(jnp.finfo(dtype).eps)


def relative_error(x: Any, exact: Any) -> float:
    x, exact = (np.asarray(y, np.float64) for y in (x, exact))
    return float(np.linalg.norm(x - exact) / np.linalg.norm(exact))


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)
