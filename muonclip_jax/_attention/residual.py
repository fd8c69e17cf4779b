"""A bound on the largest logits from the log-sum-exp of fused kernels."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from .._axes import on_automatic_axes
from .._model.statistics import largest
from .._options import FINITE, flag, number
from .logits import broadcasting, fitting, make_window, result_specs


def residual_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""`jax.nn.dot_product_attention`, with a bound on its largest logits.

    Fused kernels such as cuDNN's keep no maximum but the log-sum-exp of each softmax,
    and

    $$S_h \;\le\; \max_{b,i} \log \sum_j e^{S_{bhij}} \;\le\; S_h + \log n$$

    for `n` keys: the sum has `n` terms, none larger than the largest. Clipped by the
    bound, no head exceeds the threshold; a head may be clipped though its logits are up
    to `log n` under it (9 for 8192 keys), and shrinks by `tau/bound`, not `tau/S`. JAX
    rounds the residual to the dtype of the keys; half a unit of its last place is
    added, so that the bound holds.

    **Arguments:** as for `jax.nn.dot_product_attention`, which forms the softmax in
    float32 whatever the dtypes, with any number of batch axes; `implementation="cudnn"`
    on GPUs.

    **Returns:** the output and the bound, `(heads,)` float32 without gradient.

    **Raises:** `ValueError` where shapes do not fit, as for [`max_logits`][], and for
    axes of size zero.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> output, bound = mc.residual_attention(x, x, x)
        >>> bound  # the largest logits are 2, and log(3) is 1.1
        Array([3.0986125, 3.0986125], dtype=float32)

    ??? cite "References"

        Dao, "FlashAttention-2", arXiv:2307.08691, section 3.1.1, for the log-sum-exp.
    """
    number("scale", scale, FINITE, "None")
    is_causal = flag("is_causal", is_causal)
    shape, (query, key, value) = fitting(query, key, value)
    if 0 in key.shape[-3:]:
        raise ValueError(
            f"key {key.shape}: jax.nn.dot_product_attention needs a key, a head and a "
            "head_dim; blockwise_attention does without"
        )
    arrays = [
        query,
        key,
        value,
        broadcasting("bias", bias, shape),
        broadcasting("mask", mask, shape, bool),
    ]
    window = None
    if local_window_size is not None:
        # To jax.nn both sides are numbers.
        sides, everything = make_window(False, local_window_size), max(shape[-2:])
        window = tuple(everything if side is None else side for side in sides)
    attend = functools.partial(
        _attend,
        scale=scale,
        is_causal=is_causal,
        local_window_size=window,
        implementation=implementation,
    )
    output, _, statistic = result_specs(query)
    return on_automatic_axes(attend, *arrays, results=(output, statistic))


def _attend(*arrays: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    batch = arrays[0].shape[:-3]
    query, key, value, bias, mask = (_flat(x, batch) for x in arrays)
    # For short dtypes jax.nn computes the softmax in float32, which mixes dtypes: under
    # strict promotion of the caller that would be an error.
    with jax.numpy_dtype_promotion("standard"):
        output, log_sum_exp = jax.nn.dot_product_attention(
            query, key, value, bias, mask, return_residual=True, **options
        )
    # Rounding to nearest moves x by at most eps / 2 * |x|: 0.4 % in bfloat16, which is
    # 0.4 of a logit of 100. Infinities are exact, and their margin would be infinite.
    rounding = float(jnp.finfo(log_sum_exp.dtype).eps) / 2
    bound = largest(log_sum_exp.astype(jnp.float32), (0, 1))
    bound += jnp.where(jnp.isinf(bound), 0, rounding * jnp.abs(bound))
    return output.reshape(*batch, *output.shape[1:]), jax.lax.stop_gradient(bound)


def _flat(x: Any, batch: tuple[int, ...]) -> Any:
    """An array with one batch axis, as jax.nn wants it; fewer axes than four stay."""
    if x is None or x.ndim < 3 or (x.ndim == 3 and batch):
        return x
    if len(batch) > 1:
        x = jnp.broadcast_to(x, (*batch, *x.shape[-3:]))
    return x if len(batch) == 1 else x.reshape(math.prod(batch), *x.shape[-3:])
