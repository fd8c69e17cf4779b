"""A candidate for NVIDIA Hopper: a symmetric product of which one half is computed.

A kernel by Pallas Mosaic GPU. It has been compiled and interpreted, and no card has run
it. It enters the package when a card has measured 1.2 times the plain product's speed.

Each multiprocessor goes through tiles of 128 x 256: halves of the blocks of 256 x 256
on the diagonal and below. One warpgroup fetches strips of both operands, a few ahead;
two others multiply, each 128 x 128, and store what they found twice, as it is and
transposed. Blocks on the diagonal are computed whole, so their two halves are equal
only as far as the sums of a product do not depend on the order of its operands.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl


TILE = 128  # rows and columns of the sums that one warpgroup holds, in 128 registers
BLOCK = 2 * TILE
DEPTH = 64  # columns of a strip, 128 bytes: the widest swizzle of shared memory
PIECE = 64  # rows and columns that are stored at once: larger ones leave strips no room
COMPUTING = 2  # warpgroups
FETCHING_REGISTERS = 40  # of the one that fetches; the two others share what is left
BOTH = TILE * COMPUTING  # columns of a tile

_SWIZZLE = plgpu.find_swizzle(DEPTH * 16)
#: As the tensor cores want their operands: tiles of 8 rows, swizzled. A type checker
#: takes JAX's classes for abstract ones.
_TRANSFORMS = (
    plgpu.TilingTransform((8, _SWIZZLE // 2)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(_SWIZZLE),  # pyright: ignore[reportAbstractUsage]
)


def symmetric_product(
    x: jax.Array,
    y: jax.Array,
    c: jax.Array | None = None,
    *,
    alpha: float = 1.0,
    ahead: int = 4,
    in_flight: int = 0,
    multiprocessors: int = 132,
    interpret: Any = None,
) -> jax.Array:
    """`alpha x y' + c` of stacks of matrices, rounded once, if it is symmetric.

    `x` and `y` are `(count, m, n)` and `c` is `(count, m, m)` in one dtype of 16 bits.
    Sums are in float32. `ahead` counts the strips in shared memory, and `in_flight` the
    products that a warpgroup does not wait for, 0 or 1. `interpret` takes what
    `interpreted` of `internals.py` gives.

    **Raises:** `ValueError` if no tile fits the shape.
    """
    count, m, n = x.shape
    if m % BLOCK or n % DEPTH or x.dtype.itemsize != 2:
        raise ValueError(
            f"takes 16 bits, m in multiples of {BLOCK} and n of {DEPTH}, "
            f"and not {x.dtype.name} of {x.shape}"
        )
    # The interpreter knows no transposed view, so that it gets y transposed.
    operands = [x, y if interpret is None else y.mT, *([] if c is None else [c])]
    body = functools.partial(
        _on_one_multiprocessor,
        alpha=alpha,
        ahead=ahead,
        in_flight=in_flight,
        is_interpreted=interpret is not None,
    )
    options: dict[str, Any] = {} if interpret is None else {"interpret": interpret}
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((count, m, m), x.dtype),
        grid=(multiprocessors,),
        grid_names=("multiprocessor",),
        num_threads=COMPUTING + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        **options,
    )
    return kernel(*operands)


def _on_one_multiprocessor(
    x: Any,
    y: Any,
    *c_and_out: Any,
    alpha: float,
    ahead: int,
    in_flight: int,
    is_interpreted: bool,
) -> None:
    """Its share of the tiles; all arguments by position are in the GPU's memory."""
    *c, out = c_and_out
    count, m, n = x.shape
    blocks = m // BLOCK
    pipeline = functools.partial(
        plgpu.emit_pipeline_warp_specialized,
        grid=(n // DEPTH,),
        in_specs=_strips(in_flight, is_interpreted),
        max_concurrent_steps=ahead,
        memory_registers=FETCHING_REGISTERS,
        num_compute_wgs=COMPUTING,
        wg_axis="warpgroup",
    )

    def with_memory(strips: Any, found: Any, mirrored: Any, arrived: Any = None):
        own = lax.axis_index("warpgroup")

        @plgpu.nd_loop(
            (2 * count * _triangle(blocks),), collective_axes="multiprocessor"
        )
        def _(loop: Any) -> None:
            matrix, row, column, is_below = place(loop.index[0], blocks)

            def multiply(_: Any, x_strip: Any, y_strip: Any, sums: Any) -> Any:
                columns = pl.ds(own * TILE, TILE)
                if is_interpreted:
                    plgpu.wgmma(sums, x_strip, y_strip.at[:, columns])
                else:
                    turned = plgpu.transpose_ref(y_strip.at[columns], (1, 0))
                    plgpu.wgmma(sums, x_strip, turned)
                plgpu.wgmma_wait(in_flight)
                return sums

            def compute(run: Any) -> None:
                def with_sums(sums: Any) -> None:
                    run(sums)
                    corner = row, column + own * TILE
                    addend = [(each.at[matrix], arrived.at[own]) for each in c]
                    _store(
                        sums[...],
                        alpha,
                        addend,
                        found.at[own],
                        mirrored.at[own],
                        out.at[matrix],
                        corner,
                        is_below,
                        is_interpreted,
                    )

                # Pallas documents it, and lets type checkers not see it.
                wide = plgpu.ACC(  # pyright: ignore[reportPrivateImportUsage]
                    (TILE, TILE), jnp.float32
                )
                pl.run_scoped(with_sums, wide)

            rows, columns = pl.ds(row, TILE), pl.ds(column, BOTH)
            of_y = y.at[matrix]
            pipeline(multiply, compute_context=compute)(
                x.at[matrix].at[rows],
                of_y.at[:, columns] if is_interpreted else of_y.at[columns],
                allocations=strips,
            )

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def nothing(*_: Any) -> None: ...

    strips = pipeline(nothing, compute_context=nothing)
    pieces = plgpu.SMEM((COMPUTING, PIECE, PIECE), x.dtype, transforms=_TRANSFORMS)
    barrier = {"arrived": plgpu.Barrier(num_barriers=COMPUTING)} if c else {}
    pl.run_scoped(
        with_memory,
        strips.get_allocations(x.at[0], y.at[0]),
        pieces,
        pieces,
        **barrier,
        collective_axes="warpgroup",
    )


def _strips(in_flight: int, is_interpreted: bool) -> list[Any]:
    """The part of each operand that a tile takes at once; products keep reading it."""

    def strip(shape: tuple[int, int], place: Any) -> Any:
        return plgpu.BlockSpec(
            shape,
            place,
            transforms=_TRANSFORMS,
            memory_space=plgpu.SMEM,
            delay_release=in_flight,
        )

    of_x = strip((TILE, DEPTH), lambda k: (0, k))
    if is_interpreted:
        return [of_x, strip((DEPTH, BOTH), lambda k: (k, 0))]
    return [of_x, strip((BOTH, DEPTH), lambda k: (0, k))]


def _triangle(blocks: int) -> int:
    """How many blocks are on the diagonal and below."""
    return blocks * (blocks + 1) // 2


def place(tile: Any, blocks: int) -> tuple[Any, Any, Any, Any]:
    """The matrix of a tile, its first row and column, and whether it is mirrored."""
    matrix, tile = tile // (2 * _triangle(blocks)), tile % (2 * _triangle(blocks))
    block, half = tile // 2, tile % 2
    # A row of blocks begins where the triangle above it ends.
    begun = [(block >= _triangle(i)).astype(jnp.int32) for i in range(1, blocks)]
    row = sum(begun, start=jnp.int32(0))
    column = block - row * (row + 1) // 2
    return matrix, row * BLOCK + half * TILE, column * BLOCK, row != column


def _store(
    sums: Any,
    alpha: float,
    addend: list[tuple[Any, Any]],
    found: Any,
    mirrored: Any,
    out: Any,
    corner: tuple[Any, Any],
    is_below: Any,
    is_interpreted: bool,
) -> None:
    """Adds, rounds and writes the sums of one warpgroup, piece by piece.

    A piece of c arrives where the piece of the result is written next: shared memory
    has no room for both.
    """
    row, column = corner
    for i in range(0, TILE, PIECE):
        for j in range(0, TILE, PIECE):
            rows, columns = pl.ds(row + i, PIECE), pl.ds(column + j, PIECE)
            # The buffers are free when what was written before has been read.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            piece = alpha * sums[i : i + PIECE, j : j + PIECE]
            for c, arrived in addend:
                plgpu.copy_gmem_to_smem(c.at[rows, columns], found, arrived)
                plgpu.barrier_wait(arrived)
                piece = piece + found[...].astype(jnp.float32)
            piece = piece.astype(out.dtype)
            found[...] = piece
            if is_interpreted:
                mirrored[...] = piece.T
            else:
                turned = plgpu.layout_cast(piece, plgpu.Layout.WGMMA_TRANSPOSED)
                plgpu.transpose_ref(mirrored, (1, 0))[...] = turned
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(found, out.at[rows, columns], commit_group=False)

            mirror = functools.partial(
                plgpu.copy_smem_to_gmem,
                mirrored,
                out.at[columns, rows],
                commit_group=False,
            )
            pl.when(is_below)(mirror)
            plgpu.commit_smem_to_gmem_group()
