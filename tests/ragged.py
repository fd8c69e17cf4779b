"""`jax.lax.ragged_all_to_all` as it is documented, for CPU, where XLA has none."""

import itertools

import jax
import jax.numpy as jnp


def ragged_all_to_all(
    operand,
    output,
    input_offsets,
    send_sizes,
    output_offsets,
    recv_sizes,
    *,
    axis_name,
    axis_index_groups=None,
):
    """Row by row, from copies of what all devices have.

    What does not fit is not a number: sizes that two devices see differently, rows that
    are not there, and rows that two devices write to.
    """
    assert axis_index_groups is None
    given = operand, input_offsets, send_sizes, output_offsets
    operands, starts, sizes, places = (
        jax.lax.all_gather(x, axis_name, tiled=False) for x in given
    )
    me = jax.lax.axis_index(axis_name)
    devices, rows = operands.shape[:2]
    starts, sizes, places = (
        x.reshape(devices, devices, -1)[:, me] for x in (starts, sizes, places)
    )
    written = jnp.zeros(len(output), jnp.int32)
    fits = jnp.all(sizes.reshape(-1) == recv_sizes)
    for sender, slice_ in itertools.product(range(devices), range(starts.shape[1])):
        start, size, place = (x[sender, slice_] for x in (starts, sizes, places))
        fits &= (size >= 0) & (start >= 0) & (start + size <= rows)
        fits &= (place >= 0) & (place + size <= len(output))
        row = jnp.arange(rows)
        is_sent = (row >= start) & (row < start + size)
        to = jnp.where(is_sent, row - start + place, len(output))
        output = output.at[to].set(operands[sender], mode="drop")
        written = written.at[to].add(1, mode="drop")
    return jnp.where(fits & jnp.all(written <= 1), output, jnp.nan)
