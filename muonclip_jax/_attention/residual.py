"""A bound on the largest logits from the log-sum-exp of fused kernels."""

import jax
import jax.numpy as jnp


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

    for `n` keys. Clipped by the bound, no head exceeds the threshold; a head may be
    clipped though its logits lie up to `log n` under it (9 for 8192 keys), and shrinks
    by `tau/bound` instead of `tau/S`. JAX rounds the residual to the dtype of the
    keys; half a unit of its last place is added, so that the bound holds.

    **Arguments:** as for `jax.nn.dot_product_attention`; `implementation="cudnn"` on
    GPUs.

    **Returns:** the output and the bound, `(heads,)` float32 without gradient.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> output, bound = mc.residual_attention(x, x, x)
        >>> bound  # the largest logits are 2, and log(3) is 1.1
        Array([3.0986125, 3.0986125], dtype=float32)
    """
    output, log_sum_exp = jax.nn.dot_product_attention(  # pyright: ignore[reportCallIssue]
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        implementation=implementation,  # pyright: ignore[reportArgumentType]
        return_residual=True,
    )
    rounding = float(jnp.finfo(log_sum_exp.dtype).eps) / 2
    largest = jnp.max(
        log_sum_exp.astype(jnp.float32), axis=tuple(range(log_sum_exp.ndim - 1))
    )
    return output, jax.lax.stop_gradient(largest + rounding * jnp.abs(largest))
