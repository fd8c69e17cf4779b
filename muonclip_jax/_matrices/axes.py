"""Which axes of a leaf are matrices, as users say it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from optax.contrib import MuonDimensionNumbers

from .._options import check_whole_number


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
    r"""The axes of a leaf whose outputs are those of several matrices.

    Like `optax.contrib.MuonDimensionNumbers`, which has only the first two arguments;
    all axes that neither names are a stack. The outputs, in the order of `output_axis`,
    are

    $$n = \mathrm{groups} \cdot \sum_i \mathrm{parts}_i .$$

    Each piece is orthogonalized by itself and scaled by its own shape. Momentum, decay,
    the state and checkpoints are those of the one leaf.

    **Arguments:**

    - `reduction_axis`, `output_axis`: an axis each, or a tuple of axes: inputs and
        outputs. Outputs that are cut are adjacent axes.
    - `parts`: sizes into which the outputs are cut: query, key and value of a fused
        kernel, gate and up. `None` is one part.
    - `head_dim`: the size of a head in all parts, or one for each part; `None` for a
        part that stays whole.
    - `groups`: how many times the sequence of parts repeats. A part without `head_dim`
        is one matrix, made of all its groups.

    **Raises:** `ValueError` at construction for sizes that are not positive whole
    numbers or heads that do not divide a part; at `init`, naming the path, if the parts
    do not add up to the outputs.

    !!! example

        GPT-2's `c_attn` of `(768, 3 * 768)`, with 12 heads in query and key; a gated
        MLP's kernel of gate and up; Bloom's kernel, where each head has its query, its
        key and its value:

        >>> import muonclip_jax as mc
        >>> c_attn = mc.MatrixAxes(0, 1, parts=(768,) * 3, head_dim=(64, 64, None))
        >>> gate_up = mc.MatrixAxes(0, 1, parts=(3072, 3072))
        >>> bloom = mc.MatrixAxes(0, 1, parts=(64,) * 3, head_dim=64, groups=12)

        Two matrices of `(4, 3)` and `(4, 5)`, each orthogonal:

        >>> import jax, jax.numpy as jnp
        >>> tx = mc.scale_by_muon(
        ...     dimension_numbers={"w": mc.MatrixAxes(0, 1, parts=(3, 5))},
        ...     orthogonalizer="polar_express_8", consistent_rms=None,
        ... )
        >>> w = {"w": jax.random.normal(jax.random.key(0), (4, 8))}
        >>> update, _ = tx.update(w, tx.init(w))
        >>> jnp.linalg.norm(update["w"][:, :3], 2).round(2)
        Array(1., dtype=float32)

    ??? cite "References"

        Kimi Team, "Kimi K3", arXiv:2607.24653, section 2.5, and GLM-5 Team,
        arXiv:2602.15763, for heads.
    """

    reduction_axis: int | Sequence[int]
    output_axis: int | Sequence[int]
    _: dataclasses.KW_ONLY
    parts: tuple[int, ...] | None = None
    head_dim: int | tuple[int | None, ...] | None = None
    groups: int = 1

    def __post_init__(self) -> None:
        check_whole_number("groups", self.groups, 1)
        parts, head_dim = self.parts, self.head_dim
        if parts is not None:
            if not isinstance(parts, tuple | list) or not parts:
                raise ValueError(f"parts must be a tuple of sizes, got {parts!r}")
            for part in parts:
                check_whole_number("a part", part, 1)
            # As tuples, since with a list in it a frozen value has no hash.
            object.__setattr__(self, "parts", tuple(parts))
        if isinstance(head_dim, tuple | list):
            if parts is None or len(head_dim) != len(parts):
                raise ValueError(
                    f"head_dim={head_dim!r} has to have one entry for each of "
                    f"parts={parts!r}, or be one number"
                )
            object.__setattr__(self, "head_dim", tuple(head_dim))
        for part, size in parts_of(self, 0):
            if size is not None and part % check_whole_number("head_dim", size, 1):
                raise ValueError(f"head_dim={size} does not divide the part of {part}")


def parts_of(axes: MatrixAxes, outputs: int) -> list[tuple[int, int | None]]:
    """Returns the size of each part of the outputs, and of a head in it."""
    parts, head_dim = axes.parts or (outputs // axes.groups,), axes.head_dim
    sizes = head_dim if isinstance(head_dim, tuple) else (head_dim,) * len(parts)
    return [*zip(parts, sizes, strict=True)]


#: An entry of `dimension_numbers`.
Axes = MuonDimensionNumbers | MatrixAxes


def is_axes(x: Any) -> bool:
    """Distinguishes an entry of `dimension_numbers` from a tree of them."""
    return isinstance(x, Axes)
