"""How large an orthogonalized update is made, by the shape of its matrix."""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from .._matrices.view import MatrixView
from .._options import NOT_NEGATIVE, number


ShapeScale = float | jax.Array | Literal["mup"] | None


def check_shape_scale(consistent_rms: ShapeScale) -> None:
    if not isinstance(consistent_rms, str) or consistent_rms != "mup":
        number("consistent_rms", consistent_rms, NOT_NEGATIVE, "'mup'", "None")


def depends_on_direction(consistent_rms: ShapeScale) -> bool:
    """Whether a matrix and its transpose get two scales."""
    return consistent_rms is None or isinstance(consistent_rms, str)


def scale_by_shape(
    direction: jax.Array, view: MatrixView, consistent_rms: ShapeScale
) -> jax.Array:
    if consistent_rms is None:
        scale = math.sqrt(max(1.0, view.fan_out / view.fan_in))
    elif isinstance(consistent_rms, str):
        scale = math.sqrt(view.fan_out / view.fan_in)
    else:
        scale = consistent_rms * math.sqrt(max(view.fan_in, view.fan_out))
    return direction * jnp.asarray(scale, direction.dtype)
