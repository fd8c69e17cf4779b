"""Muon's direction: gradients to momentum, that orthogonalized, and scaled by shape."""

from __future__ import annotations  # help() shows aliases by name

import inspect
import math
from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._calls import explained
from .._layout.layout import axis_names, AxisNames, Layout, own_block
from .._layout.shardings import PlacedLeaf, Shardings
from .._matrices.pieces import along_outputs
from .._matrices.stacks import MatrixView
from .._model.knowledge import knowledge_of
from .._model.model_reading import ModelReading
from .._newton_schulz.newton_schulz import make_solver, Orthogonalizer
from .._newton_schulz.solver import Solver
from .._options import check_flag, check_float_dtype, check_number, NOT_NEGATIVE, SHARE
from .._parameters.dimension_numbers import DimensionNumbers
from .leaves import check_directed, check_matrices_only, for_leaves
from .momentum import Momentum, MomentumDType, RISING_BETA, ScaleByMuonState
from .orthogonalize import orthogonalize


#: The factor of an orthogonal matrix, by its `(fan_in, fan_out)`.
Scale = Callable[[int, int], Any]
ShapeScale = float | jax.Array | Literal["mup"] | Scale | None


@explained
def scale_by_muon(
    *,
    beta: optax.ScalarOrSchedule = RISING_BETA,
    nesterov: bool = True,
    orthogonalizer: Orthogonalizer = "keller",
    consistent_rms: ShapeScale = 0.2,
    mu_dtype: MomentumDType | None = None,
    model: ModelReading | None = None,
    dimension_numbers: DimensionNumbers | None = None,
    per_head: bool | None = None,
    shardings: Shardings | None = None,
    axis_name: Hashable | None = None,
    slow_axes: Hashable | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Turns gradients into orthogonalized momentum, scaled by shape.

    $$M_t = \beta M_{t-1} + G_t, \qquad
      O_t = \mathrm{NewtonSchulz}(G_t + \beta M_t \text{ or } M_t), \qquad
      u_t = \rho\, O_t$$

    with $\rho = 0.2 \sqrt{\max(\mathrm{fan_{in}}, \mathrm{fan_{out}})}$
    (`consistent_rms=0.2`), which gives updates the root mean square of AdamW's,
    $\rho = \sqrt{\max(1, \mathrm{fan_{out}} / \mathrm{fan_{in}})}$
    (`consistent_rms=None`), or $\rho = \sqrt{\mathrm{fan_{out}} / \mathrm{fan_{in}}}$
    (`consistent_rms="mup"`), or what a function of `(fan_in, fan_out)` returns. With
    `None` the best rate does not change with the width (the manual's "Width").

    The sources differ in three ways, and this function covers all of them: Keller
    Jordan, Moonlight's code and torch use Nesterov momentum, Kimi K2's Algorithm 1 does
    not; Kimi and Moonlight scale by the maximum, Keller Jordan by the ratio; optax
    averages momentum with bias correction, which without Nesterov is the same
    direction. Exactly Kimi K2's algorithm is `nesterov=False, per_head=False,
    beta=0.95`.

    **Arguments:**

    - `beta`: momentum decay: a number in [0, 1], or a schedule, whose values after the
        first step are clipped to that range; by default it rises from 0.85 to 0.95 over
        300 steps, `optax.linear_schedule(0.85, 0.95, 300)`.
    - `nesterov`: whether to look one step ahead.
    - `orthogonalizer`: a name of [`NS_COEFFS`][], a [`NewtonSchulz`][], a function, or
        an object with `orthogonalize(x)`. Its argument is a stack of whole matrices
        `(..., m, n)`, inputs by outputs, in float32 or wider, on one device however the
        params are sharded; it returns the same shape.
    - `consistent_rms`: root mean square of the update, `"mup"`, `None`, or a function
        of one's own, `(fan_in, fan_out) -> float`, such as
        `lambda fan_in, fan_out: 0.2 * fan_out**0.5`. `optax.inject_hyperparams` needs
        `static_args=("consistent_rms",)` for it.
    - `mu_dtype`: dtype of the momentum; the params' if `None`. In float16 it is stored
        in units of 32: finite for gradients up to $2 \cdot 10^6 (1 - \beta)$, which
        covers all of float16 up to $\beta = 0.96$, and coarse for gradients below
        $10^{-4}$ (10 % at $10^{-5}$); scale the loss up then. `"int8"` needs at most
        1.06 bytes an entry, if a matrix is 68 x 68 or larger: up to 32 of the largest
        directions are stored separately, and the rest as one code for each entry, on
        the scale of its row or column. `benchmarks/momentum_in_8_bits.py` measures how
        close that stays to float32.
    - `model`: what [`read_model`][] returns: which leaves are matrices, and along which
        axes. For leaves that it does not know, names decide.
    - `dimension_numbers`: a tree of `optax.contrib.MuonDimensionNumbers` or
        [`MatrixAxes`][], a prefix of one, a mapping from patterns of paths, or a
        function of the params. It overrides `model`; the default is
        [`flax_dimension_numbers`][] with `per_head`.
    - `per_head`: whether every head of a query and a key is a matrix of its own, as in
        Kimi K3 (arXiv:2607.24653, section 2.5) and GLM-5: as an axis, or in a flat or
        fused kernel. With a `model` these are the heads that it shows; without, the
        axes of heads in stock layers, also those of the value. `None` means wherever
        heads are known and `dimension_numbers` do not say otherwise; `True` raises an
        error if heads cannot be separated; `False` keeps them in one matrix.
    - `shardings`: how a mesh shards the params: a tree of `jax.sharding.NamedSharding`
        or (with `jax.set_mesh`) `PartitionSpec`, a prefix of one, or a function of the
        params. Every device then orthogonalizes its share of the whole matrices, with
        two exchanges for each stack that is shared out evenly, and two for all others
        together. For arrays outside `jit`, and with explicit axes, the shardings
        are known. Under `jit` with automatic axes they are not: if you leave this out,
        XLA chooses how to send matrices to the devices that iterate them; the update is
        the same, over several axes with more traffic.
    - `axis_name`: the axis of `jax.pmap` or `jax.shard_map`, or a tuple of axes, over
        whose replicas the batch is divided. They divide the matrices among them and
        gather the results, so that each iterates its part and all end with the same
        bits. The update itself averages the gradients over them; if they are already
        averaged, the result is the same, with one more all-reduce. In a `shard_map`
        that checks types (`check_vma`), `jax.grad` of a loss over the device's own rows
        returns the sum of the gradients over the devices, and the update uses that sum.
        So differentiate `jax.lax.pmean(loss, axis_name)` there.
    - `slow_axes`: an axis of a mesh or a mapped one, or a tuple of axes. Devices along
        it that hold copies of a matrix share the work on it; along these axes each does
        all of it, and nothing is sent: worth it where links between slices or hosts are
        slower than the iteration. A leaf that such an axis cuts is sent as usual.

    Inside `jax.shard_map` the leaves may be blocks, cut along its axes (FSDP, tensor
    parallelism). Give their `shardings`, as a tree, since a function would get the
    shapes of blocks. The update is that of the whole matrices, and devices along these
    axes share the work. Other leaves must be the same along them. Gradients are
    averaged over the axes of `axis_name` that do not cut the leaf; over those that do,
    average them yourself, as with `jax.lax.psum_scatter`.

    **Returns:** an `optax.GradientTransformationExtraArgs`. Updates keep the dtype of
    the gradients.

    **Raises:** `ValueError` at construction for what [`newton_schulz`][] refuses and
    for a `mu_dtype` that is neither a float nor int8, a `beta` outside [0, 1] and a
    negative `consistent_rms`; at `init` for a `beta` that begins outside [0, 1] and,
    naming the paths, for leaves that hold no matrix or whose axes are ambiguous, for
    shardings that do not fit and for complex params with `mu_dtype="int8"`; from the
    update, for a state of the other kind of `mu_dtype`, for an `axis_name` that is not
    an axis there, and if types show that leaves differ along an axis whose devices
    share the work, or are the same along one that `shardings` says cuts them.

    !!! example

        >>> import jax, operator, optax
        >>> import muonclip_jax as mc
        >>> tx = optax.chain(
        ...     optax.masked(mc.scale_by_muon(), mc.matrix_mask),
        ...     optax.masked(
        ...         optax.scale_by_adam(),
        ...         lambda p: jax.tree.map(operator.not_, mc.matrix_mask(p)),
        ...     ),
        ...     optax.scale_by_learning_rate(1e-3),
        ... )

    ??? cite "References"

        Jordan et al., "Muon", 2024; Liu et al., "Muon is Scalable for LLM Training",
        arXiv:2502.16982, eq. 4; Kimi Team, "Kimi K2", arXiv:2507.20534, Algorithm 1.
    """
    direction = make_direction(
        beta, nesterov, orthogonalizer, consistent_rms, mu_dtype, slow_axes
    )

    def build(layout: Layout) -> optax.GradientTransformationExtraArgs:
        check_matrices_only(layout, "scale_by_muon")
        return direction.of(layout)

    return for_leaves(
        "scale_by_muon",
        build,
        ScaleByMuonState,
        knowledge_of(model, None, dimension_numbers, per_head),
        shardings=shardings,
        axis_name=axis_name,
    )


def make_direction(
    beta: optax.ScalarOrSchedule,
    nesterov: bool,
    orthogonalizer: Orthogonalizer,
    consistent_rms: ShapeScale,
    mu_dtype: MomentumDType | None,
    slow_axes: Hashable | None,
) -> Direction:
    """Makes Muon's direction from the options that `scale_by_muon` and `muon` share.

    **Raises:** `ValueError` for what cannot work, naming the argument.
    """
    solver = make_solver(orthogonalizer)
    beta = check_number("beta", beta, SHARE, "a schedule")
    nesterov = check_flag("nesterov", nesterov)
    momentum = Momentum(
        beta, nesterov, check_float_dtype("mu_dtype", mu_dtype, also="int8")
    )
    slow = axis_names(slow_axes, "slow_axes")
    return Direction(momentum, solver, slow, *_scale_of(consistent_rms))


def _scale_of(consistent_rms: ShapeScale) -> tuple[Scale, Any]:
    """Returns the scale by shape, and a further factor; `None` stands for 1.

    The factor may be traced.
    """
    # These two are spectral: they bound what a step does to activations whose entries
    # have a root mean square of 1 (arXiv:2310.17813, condition 1).
    if consistent_rms is None:
        return lambda fan_in, fan_out: math.sqrt(max(1, fan_out / fan_in)), None
    if isinstance(consistent_rms, str) and consistent_rms == "mup":
        return lambda fan_in, fan_out: math.sqrt(fan_out / fan_in), None
    if callable(consistent_rms) and _takes_two(consistent_rms):
        return consistent_rms, None
    others = ("'mup'", "None", "a function of (fan_in, fan_out)")
    check_number("consistent_rms", consistent_rms, NOT_NEGATIVE, *others)
    # An orthogonal (m, n) has min(m, n) singular values of 1, so its entries have a
    # root mean square of 1 / sqrt(max(m, n)), which this undoes.
    return lambda fan_in, fan_out: math.sqrt(max(fan_in, fan_out)), consistent_rms


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether a function is a scale; a schedule takes one argument, the step."""
    try:
        inspect.signature(function).bind(1, 1)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


class Direction(NamedTuple):
    """Muon's direction: momentum, orthogonalized, scaled by shape."""

    momentum: Momentum
    solver: Solver
    slow: AxisNames  # along which copies repeat the work
    scale: Scale
    rms: float | jax.Array | None  # of the update, if that does not depend on shape

    def of(self, layout: Layout) -> optax.GradientTransformationExtraArgs:
        """Returns the transformation; leaves without a view pass through."""
        if self.rms is None:
            # The scales of a matrix and of its transpose differ.
            check_directed(layout)

        def init_fn(params: optax.Params) -> Any:
            return self.momentum.init(params, layout)

        def update_fn(updates, state: Any, params=None, **extra_args):
            del params, extra_args
            # A leaf without entries has nothing to orthogonalize and no scale.
            gradients = [
                leaf
                if leaf.view and math.prod(leaf.view.shape)
                else leaf._replace(view=None)
                for leaf in layout.of(updates)
            ]
            ahead, state = self.momentum.update(state, layout, gradients)
            layout.check_types(ahead)
            directions = orthogonalize(self.solver, ahead, layout, self.slow)
            return layout.tree.unflatten(map(self._scale, directions)), state

        return optax.GradientTransformationExtraArgs(init_fn, update_fn)

    def _scale(self, leaf: PlacedLeaf) -> jax.Array:
        """Returns the array in the gradient's dtype, scaled if the leaf has a view."""
        direction, view = leaf.array, leaf.view
        if view is None:
            return direction

        def scale(view: MatrixView) -> Any:
            factor = self.scale(*view.matrix_shape)
            check_number(f"consistent_rms{view.matrix_shape}", factor, NOT_NEGATIVE)
            return factor

        if view.division is None:
            factor = scale(view)
        else:  # a factor per piece of the whole leaf; this may be a block
            factor = own_block(jnp.asarray(along_outputs(view, scale)), leaf.cut)
        factor = factor if self.rms is None else self.rms * factor
        scaled = direction * jnp.asarray(factor, direction.dtype)
        return scaled.astype(leaf.whole.dtype)
