"""Decoupled weight decay, on all entries or where it does not fight the update."""

from __future__ import annotations  # help() shows aliases by name

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from .._options import check_flag, check_number, FINITE
from .._parameters import paths
from .._parameters.given import broadcast, check_no_number


Mask = Any | Callable[[optax.Params], Any] | None


def add_cautious_decayed_weights(
    weight_decay: optax.ScalarOrSchedule, mask: Mask = None
) -> optax.GradientTransformation:
    r"""Adds decay to the entries whose update has the sign of the weight.

    $$u \leftarrow u + \lambda\, w \cdot [u w > 0]$$

    Put it in the place of `optax.add_decayed_weights`, before the learning rate and its
    minus sign: it then decays the weights that the step makes smaller, and never pulls
    a weight against its update. Where the update is 0 the weight stays, as that of a
    row without a gradient; the paper's condition is $u w \ge 0$, which decays it.

    **Arguments:**

    - `weight_decay`: a float or a schedule.
    - `mask`: a tree of bools, a prefix of one, or a function of the params, as for
        `optax.masked`.

    **Returns:** an `optax.GradientTransformation` whose update needs the params.
    Updates and params are arrays of any shape; the result has the dtype that both
    promote to, as in optax. With a decay of 0 it is the update itself.

    **Raises:** `ValueError` from the update without params.

    !!! example

        >>> import jax.numpy as jnp
        >>> import muonclip_jax as mc
        >>> tx = mc.add_cautious_decayed_weights(0.5)
        >>> w, u = jnp.array([2.0, 2.0, -2.0]), jnp.array([1.0, -1.0, -1.0])
        >>> tx.update(u, tx.init(w), w)[0]
        Array([ 2., -1., -2.], dtype=float32)

    ??? cite "References"

        Chen et al., "Cautious Weight Decay", arXiv:2510.12402, Algorithm 1.
    """
    (weight_decay,) = check_rates(weight_decay=weight_decay)
    check_no_number("mask", mask)
    return decayed_weights(weight_decay, mask, is_cautious=True)


def decayed_weights(
    weight_decay: optax.ScalarOrSchedule, mask: Mask, *, is_cautious: bool
) -> optax.GradientTransformation:
    """Returns plain or cautious decay, whose schedule counts steps.

    `optax.add_decayed_weights` of Optax 0.2.6 calls no schedule.
    """

    def init_fn(params: optax.Params) -> Any:
        del params
        if not callable(weight_decay):
            return optax.EmptyState()
        return optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32))

    def update_fn(updates, state, params=None):
        rate: Any = weight_decay
        if callable(weight_decay):
            rate = weight_decay(state.count)
            state = state._replace(count=optax.safe_increment(state.count))
        # An eager step does not wait for what a schedule computes on a device.
        is_unknown = isinstance(rate, jax.Array if callable(weight_decay) else Tracer)
        # 0 times an infinite weight would be NaN; without leaves no params are needed.
        if not (is_unknown or rate) or not jax.tree.leaves(updates):
            return updates, state
        if params is None:
            raise ValueError(
                "weight decay needs the params: call update(grads, state, params), or "
                "give weight_decay=0.0 (under optax.inject_hyperparams with "
                "static_args=('weight_decay',))"
            )
        return jax.tree.map(lambda u, w: decay(u, w, rate), updates, params), state

    def decay(update: jax.Array, weight: jax.Array, rate: Any) -> jax.Array:
        # A mask and not a factor: where signs differ the update stays to the bit.
        decayed = update + rate * weight
        if not is_cautious:
            return decayed
        return jnp.where(_agree(update, weight), decayed, update.astype(decayed.dtype))

    tx = optax.GradientTransformation(init_fn, update_fn)
    if mask is None:
        return tx
    masked = optax.masked(tx, mask)

    def update_masked(updates, state, params=None):
        hidden: Any = optax.MaskedState(state)
        updates, hidden = masked.update(updates, hidden, params)
        return updates, hidden.inner_state

    # The state has no `MaskedState`, so that a run can go on with another mask.
    return optax.GradientTransformation(init_fn, update_masked)


def check_rates(**rates: optax.ScalarOrSchedule | None) -> list[Any]:
    """Returns the rates, checked to be numbers or schedules of numbers.

    `None` means the same as for Muon.
    """
    needed = ("learning_rate", "weight_decay")
    return [
        check_number(
            name, rate, FINITE, "a schedule", *[] if name in needed else ["None"]
        )
        for name, rate in rates.items()
    ]


def decay_mask(mask: Any, tree: paths.PathedTree) -> Any:
    """Returns a tree of bools, from a tree, a prefix, a function or NNX's state."""
    if paths.is_function(mask) and tree.paths:
        mask = mask(tree.rebuilt())
    if mask is None:
        return None
    check_no_number("weight_decay_mask", mask, tree)
    entries = broadcast(
        mask,
        tree,
        name="weight_decay_mask",
        is_entry=lambda x: jax.tree_util.all_leaves([x]),
        expected="a bool",
    )
    # A leaf with `None`, or that a mask around this hides, does not decay.
    return tree.unflatten(
        x is not None
        and not paths.is_masked(x)
        and check_flag(f"weight_decay_mask at '{paths.show(path)}'", x)
        for path, _, x in tree.rows(entries)
    )


def _agree(x: jax.Array, y: jax.Array) -> jax.Array:
    # Signs, since a product of small numbers may vanish.
    return jnp.real(jnp.conj(jnp.sign(x)) * jnp.sign(y)) > 0
