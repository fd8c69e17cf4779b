"""What the kernels for symmetric products share."""

import jax
import jax.numpy as jnp
import numpy as np


def lower_tiles(m: int, edge: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows and columns of the tiles on and below the diagonal of `(m, m)`."""
    rows, columns = np.tril_indices(-(-m // edge))
    return rows.astype(np.int32), columns.astype(np.int32)


def product_shape(x: jax.Array, y: jax.Array, out_dtype) -> jax.ShapeDtypeStruct:
    """That of `x @ y.mT`."""
    if x.ndim != 3 or x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(
            "symmetric_product takes two stacks (count, m, n) of one shape and dtype, "
            f"not {x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}."
        )
    count, m, _ = x.shape
    return jax.ShapeDtypeStruct((count, m, m), out_dtype or x.dtype)


def tile_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x @ y.T` in float32."""
    contract_last = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, y, contract_last, preferred_element_type=jnp.float32)
