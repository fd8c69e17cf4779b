"""The error of the update's iteration on a GPU: float16, products with their sums.

    JAX_PLATFORMS=cpu python benchmarks/float16_on_gpu.py

On a CPU, which rounds as cuBLAS does: products accumulate in float32, and each is
rounded once, after what is added to it. Next to it stands the form with float32 between
products, which a GPU ran until 502ee87. The matrices are those of `spectra.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from internals import solver
from spectra import Case, synthetic
from tables import parser, Report

import muonclip_jax as mc


COLUMNS = {
    "spectrum": "",
    "preset": "",
    "sums apart": ".1e",
    "sums in products": ".1e",
    "times": ".2f",
}


def main() -> None:
    report = Report(parser(__doc__).parse_args())
    title = "Relative error in float16 on a GPU, Frobenius norm"
    table = report.table(title, COLUMNS)
    for spectrum, x in synthetic().items():
        for preset in mc.NS_COEFFS:
            case = Case(x, preset)
            before, now = (
                case.relative_error(iterated(x, preset, adds)) for adds in (False, True)
            )
            table.add(spectrum, preset, before, now, now / before)
    report.write()


def iterated(x: np.ndarray, preset: str, adds: bool) -> jax.Array:
    its = solver("gpu", coeffs=preset)
    own = dataclasses.replace(its.platform, adds_in_products=adds)
    return jax.jit(dataclasses.replace(its, platform=own).orthogonalize)(jnp.asarray(x))


if __name__ == "__main__":
    main()
