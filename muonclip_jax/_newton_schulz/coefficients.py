"""Newton-Schulz coefficient schedules, each checked before it is used."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._options import shown


Triple = tuple[float, float, float]
Schedule = tuple[Triple, ...]

# Amsel et al., arXiv:2505.16932, optimal for singular values in [1e-3, 1].
_POLAR_EXPRESS_RAW: Schedule = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    # From here on the interval is narrow, and the optimum is the Pade step of order 5,
    # 15/8 - 10/8 s^2 + 3/8 s^4.
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

# Grishina et al., arXiv:2506.10935, as printed in NVIDIA's Emerging-Optimizers.
_CANS_RAW: Schedule = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)

# "How Much Orthogonalization Does Muon Need?", arXiv:2606.00371, as in NVIDIA's
# Emerging-Optimizers: without squares, optimal for singular values in [7e-3, 1] where
# all from 0.7 to 1.3 will do.
_CUBIC_RAW: Schedule = (
    (3.3656576, -3.3420992, 0.0),
    (2.5744352, -1.4957376, 0.0),
    (2.5368962, -1.4312570, 0.0),
    (2.4418906, -1.2764040, 0.0),
    (2.2230472, -0.9630650, 0.0),
)


def _shrink(schedule: Schedule, factor: float = 1.01) -> Schedule:
    """Composes every step but the last with `x / factor`.

    Optimal schedules end at 1 exactly and diverge beyond; rounding goes there. 1.01 is
    the safety factor of arXiv:2505.16932, appendix G.
    """
    return (
        *((a / factor, b / factor**3, c / factor**5) for a, b, c in schedule[:-1]),
        schedule[-1],
    )


#: The names of `NS_COEFFS`, as a type checker knows them.
Preset = Literal[
    "keller",
    "quintic",
    "polar_express",
    "polar_express_6",
    "polar_express_8",
    "cans",
    "cubic5",
    "turbo_muon",
    "deepseek_v4",
]

NS_COEFFS: Mapping[str, Schedule] = MappingProxyType(
    {
        # Leaves singular values in about [0.7, 1.2].
        "keller": ((3.4445, -4.7750, 2.0315),) * 5,
        "quintic": (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        # Six steps leave all above 1e-2 within 0.003 of 1.
        "polar_express": _shrink(_POLAR_EXPRESS_RAW[:5]),
        "polar_express_6": _shrink(_POLAR_EXPRESS_RAW[:6]),
        "polar_express_8": _shrink(_POLAR_EXPRESS_RAW),
        # Chebyshev-type polynomials.
        "cans": _shrink(_CANS_RAW),
        # Ten products in place of fifteen.
        "cubic5": _shrink(_CUBIC_RAW),
        "turbo_muon": (
            (4.6051, -9.6552, 5.6769),
            (4.7505, -6.0861, 2.1790),
            (2.7763, -2.3190, 0.5523),
            (2.4231, -2.2861, 0.8193),
        ),
        # Eight fast steps, two that converge.
        "deepseek_v4": ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2,
    }
)
r"""The presets of coefficients: names to the triples `(a, b, c)` of their steps.

$$s \leftarrow a s + b s^3 + c s^5$$

for every singular value $s$ in $[0, 1]$. A read-only mapping. A preset of one repeated
triple has as many steps as are asked for; of any other the first ones can run alone.

| preset | steps | source |
|---|---|---|
| `"keller"` | any | Jordan et al., "Muon", 2024; Moonlight, Kimi K2, PyTorch |
| `"quintic"` | 5 | You Jiacheng; `"dion"` in Optax |
| `"polar_express"`, ... `"_6"`, ... `"_8"` | 5, 6, 8 | Amsel et al., arXiv:2505.16932 |
| `"cans"` | 5 | Grishina et al., arXiv:2506.10935, with the margin of Amsel et al. |
| `"cubic5"` | 5, without squares | arXiv:2606.00371, with the same margin |
| `"turbo_muon"` | 4 | Boissin et al., arXiv:2512.04632, for `preconditioning="aol"` |
| `"deepseek_v4"` | 10 | DeepSeek-V4 technical report |

!!! example

    >>> import muonclip_jax as mc
    >>> mc.NS_COEFFS["keller"][0]
    (3.4445, -4.775, 2.0315)
"""


def resolve_schedule(
    coeffs: Preset | Triple | Schedule, steps: int | None = None
) -> Schedule:
    """Returns the steps to run, as Python floats: all, or the first `steps`.

    A single triple `(a, b, c)`, and a preset that repeats one, runs any number of
    times: by default 5 times for a triple, and as often as the preset has it.
    """
    schedule = _named_or_given(coeffs)
    if len(set(schedule)) == 1 and (isinstance(coeffs, str) or np.ndim(coeffs) == 1):
        usual = len(schedule) if isinstance(coeffs, str) else 5
        schedule = schedule[:1] * (usual if steps is None else steps)
    if steps is not None and steps > len(schedule):
        raise ValueError(
            f"steps={steps} is more than the {len(schedule)} of the coefficients "
            f"{shown(coeffs)}; leave steps out to run all of them"
        )
    schedule = schedule[:steps]
    check_schedule(schedule, "float32")
    return schedule


def _named_or_given(coeffs: Any) -> Schedule:
    if isinstance(coeffs, str):
        if coeffs not in NS_COEFFS:
            raise ValueError(
                f"unknown coeffs {coeffs!r}; known presets are "
                f"{sorted(NS_COEFFS)}, or pass (a, b, c) or a tuple of them"
            )
        return NS_COEFFS[coeffs]
    if isinstance(coeffs, Tracer):
        raise ValueError("coeffs must not be traced; pass a tuple of floats")
    try:
        triples = np.asarray(coeffs, dtype=np.float64)
    except (TypeError, ValueError):
        triples = np.zeros(0)
    if triples.ndim not in (1, 2) or triples.shape[-1] != 3 or not triples.size:
        raise ValueError(
            "coeffs must be a preset name, one triple (a, b, c) or a tuple of "
            f"triples; got {shown(coeffs)}"
        )
    return tuple((float(a), float(b), float(c)) for a, b, c in triples.reshape(-1, 3))


def as_tuples(
    coeffs: Any, steps: int | None
) -> tuple[str | Triple | Schedule, int | None]:
    """Returns coefficients and steps that compare equal, however they were given.

    One triple, which may run any number of times, stays one with its steps.
    """
    if isinstance(coeffs, str):
        return coeffs, steps
    triples = _named_or_given(coeffs)
    if len(set(triples)) > 1:
        return triples, steps
    return triples[0], len(resolve_schedule(coeffs, steps))


def check_schedule(schedule: Schedule, dtype: str) -> None:
    """Raises unless the schedule maps (0, 1] to finite, positive, bounded values."""
    if (bad := find_unstable(schedule, dtype)) is not None:
        raise ValueError(
            f"unstable coeffs in {dtype}: after {len(schedule)} steps a singular "
            f"value of {bad[0]:.4g} becomes {bad[1]:.4g}, outside (0, 2]: {schedule}"
        )


# Cached: the sweep takes milliseconds, and `optax.inject_hyperparams` makes a new
# transformation in every update.
@functools.lru_cache(maxsize=256)
def find_unstable(schedule: Schedule, dtype: str) -> tuple[float, float] | None:
    """Returns a singular value that leaves (0, 2], and its image; `None` if all stay.

    The sweep rounds to `dtype` after every step, as the iteration does, and goes
    one unit of rounding beyond 1, where rounding may have pushed a singular value.
    """
    eps = float(jnp.finfo(dtype).eps)
    # Small values are spaced by their logarithm, since a schedule lifts each by a
    # factor; from 0.5 on evenly, since polynomials overshoot there.
    start = np.concatenate(
        [np.geomspace(1e-3, 1, 4096), np.linspace(0.5, 1 + eps, 4096)]
    )
    end = start
    with np.errstate(all="ignore"):  # an unstable schedule overflows
        for a, b, c in ((1.0, 0.0, 0.0), *schedule):
            end = a * end + b * end**3 + c * end**5
            end = end.astype(jnp.dtype(dtype)).astype(np.float64)
    bad = ~np.isfinite(end) | (end <= 0) | (end > 2)
    return (start[bad][-1], end[bad][-1]) if bad.any() else None
