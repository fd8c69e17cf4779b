"""Fused attention kernels, whose logits no equation has: what each of them computes.

A kernel is read as the plain attention that it stands for. Its statistic is formed
next to it where its equation says scale and mask, in memory that does not grow with the
square of the length. Kernels without a rule are unknown.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._attention.max_logits import max_logits
from . import jaxprs


class Kernel(NamedTuple):
    """A call of a kernel."""

    # `(batch, heads, length, dim)`; else with the length before the heads.
    heads_first: bool
    # Where among its inputs query, key and value are.
    operands: Sequence[int] = (0, 1, 2)
    # The largest logit of each head, from all inputs; `None` if no equation says it.
    largest: Callable[[Sequence[Any]], jax.Array] | None = None
    # The output that has the maximum of each row of logits.
    maxima: int | None = None

    def plain(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """Attention without mask and scale, which change nothing of what is linear."""
        if not self.heads_first:
            query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        group = query.shape[1] // key.shape[1]
        key, value = (jnp.repeat(x, group, 1) for x in (key, value))
        out = jax.nn.softmax(query @ key.mT) @ value
        return out if self.heads_first else jnp.swapaxes(out, 1, 2)


# Kernels of Pallas, by the end of their function and file, have scale and mask in their
# code. Of their inputs the first three arrays of rank 4 are query, key and value.
_SPLASH = "tpu/splash_attention/splash_attention_kernel.py"
_TOKAMAX = "tokamax/_src/ops/experimental"
_PALLAS = {
    ("mha_forward", "pallas/ops/gpu/attention.py"): Kernel(False),
    ("_flash_attention_kernel", "pallas/ops/tpu/flash_attention.py"): Kernel(True),
    ("splash_mha_fwd_no_residuals", _SPLASH): Kernel(True),  # JAX's and tokamax's
    # That of `mc.splash_attention`: output, logarithms of sums, maxima.
    ("splash_mha_fwd_residuals", f"{_TOKAMAX}/{_SPLASH}"): Kernel(True, maxima=2),
}


def kernel_of(eqn: Any) -> Kernel | None:
    """The kernel that an equation calls, if it has a rule."""
    name = jaxprs.kernel_name(eqn)
    if name == "dot_product_attention_fwd_wrapper":
        return _cudnn(eqn)
    function, _, path = name.partition(" at ")
    ranks = [len(jaxprs.shape_of(x)) for x in eqn.invars]
    operands = [i for i, rank in enumerate(ranks) if rank == 4][:3]
    for (own, file), kernel in _PALLAS.items():
        if function == own and path.endswith(f"/{file}") and len(operands) == 3:
            return kernel._replace(operands=operands)
    return None


def _cudnn(eqn: Any) -> Kernel:
    """`jax.nn.dot_product_attention(implementation="cudnn")`.

    Its inputs are query, key, value, bias (masks in it as large negative numbers), the
    lengths of query and key, and what paged and packed sequences need; its parameters
    are the same from JAX 0.8 to 0.12.
    """
    params = eqn.params
    heads_first = params["layout"] == 1  # AttentionLayout.BNTH
    mask = getattr(params["mask_type"], "name", str(params["mask_type"]))
    # Offsets and pages are arrays of size zero where unused.
    is_packed = any(0 not in jaxprs.shape_of(x) for x in eqn.invars[6:10])
    is_modified = params.get("score_mod") is not None
    if is_packed or is_modified or mask == "ALIBI":
        return Kernel(heads_first)

    def largest(inputs: Sequence[Any]) -> jax.Array:
        query, key, _, bias, query_lengths, key_lengths = inputs[:6]
        if heads_first:
            query, key = (jnp.swapaxes(x, 1, 2) for x in (query, key))
        options: dict[str, Any] = {"scale": params["scale"]}
        if bias.size:
            options["bias"] = bias
        if "PADDING" in mask:
            # As segments: what is padding on either side is of no segment in common.
            lengths = zip((query, key), (query_lengths, key_lengths), strict=True)
            is_padding = [jnp.arange(x.shape[1]) >= n[:, None] for x, n in lengths]
            options["query_segment_ids"] = jnp.where(is_padding[0], 1, 0)
            options["key_segment_ids"] = jnp.where(is_padding[1], 2, 0)
        if window := params["sliding_window_length"]:
            # A query sees itself and those before it, `window` in all.
            options["local_window_size"] = (window - 1, 0)
        return max_logits(query, key, is_causal="CAUSAL" in mask, **options)

    return Kernel(heads_first, largest=largest)


def body_of(kernel: Kernel, eqn: Any) -> jaxprs.Inner:
    """The jaxpr of the plain attention that a kernel stands for, on its operands."""
    avals = [eqn.invars[i].aval for i in kernel.operands]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    return jaxprs.trace(kernel.plain, *shapes)
