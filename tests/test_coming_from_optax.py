"""Each line of the tables under "Differences" in docs/from_optax.md, against optax."""

import inspect
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal, polynomial_of, ROOT, updates_of
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

THEIRS, OURS = (
    {name: p.default for name, p in inspect.signature(f).parameters.items()}
    for f in (optax.contrib.muon, mc.muon)
)
MATRIX = {"w": normal(0, 6, 9)}
VECTOR = {"b": normal(1, 9)}


def rows():
    page = (ROOT / "docs/from_optax.md").read_text()
    table = page.split("| `optax.contrib.muon` | here |\n|---|---|\n")[1]
    return [line.split(" | ")[0].strip("| ") for line in table.splitlines()[:50]]


def two_updates(tx, params):
    grads = ({k: normal((2, i), *p.shape) for k, p in params.items()} for i in range(2))
    return updates_of(tx, grads, params)[0]


def close(ours, theirs, params=MATRIX):
    ours, theirs = (two_updates(tx, params) for tx in (ours, theirs))
    return all(
        np.allclose(ours[k], theirs[k], rtol=1e-3, atol=1e-5 * np.abs(theirs[k]).max())
        for k in params
    )


#: Options that make the two agree on a matrix, but for one line of the table.
SAME = dict(beta=0.95, consistent_rms=0.2, weight_decay=0.1, nesterov=False)


def by_rank():
    params = {"embed": {"embedding": jnp.ones((5, 4))}, "w": jnp.ones((4, 5))}
    state = optax.contrib.muon(1.0).init(params).inner_states["muon"].inner_state[0]
    assert isinstance(state.mu["embed"]["embedding"], jax.Array)
    assert mc.matrix_mask(params) == {"embed": {"embedding": False}, "w": True}
    kernel = {"query": {"kernel": jnp.ones((4, 2, 3)), "bias": jnp.ones((2, 3))}}
    labels = jax.tree.map(lambda x: x.ndim == 2, kernel)
    assert labels == {"query": {"kernel": False, "bias": True}}
    mask = mc.matrix_mask(kernel | {"key": kernel["query"]})
    assert mask["query"] == {"kernel": True, "bias": False}


def scale():
    assert (THEIRS["consistent_rms"], OURS["consistent_rms"]) == (None, 0.2)
    assert close(mc.muon(1.0, **SAME), optax.contrib.muon(1.0, **SAME))


def decay():
    assert THEIRS["weight_decay"] == THEIRS["adam_weight_decay"] == 0.0
    assert (OURS["weight_decay"], OURS["adam_weight_decay"]) == (0.1, None)
    theirs = optax.contrib.muon(
        1.0, weight_decay=0.3, adam_weight_decay=0.3, adam_b2=0.95, nesterov=False
    )
    assert close(mc.muon(1.0, weight_decay=0.3), theirs, VECTOR)


def coefficients():
    presets = optax.contrib._muon._NS_COEFFS_PRESET_DICT
    ours = [mc.NS_COEFFS["keller"], mc.NS_COEFFS["quintic"]]
    assert len(presets) == 2
    for theirs, preset in zip(presets.values(), ours, strict=True):
        np.testing.assert_allclose(np.broadcast_to(theirs, (5, 3)), preset)
    assert not mc.NS_COEFFS.keys() & presets.keys()
    with pytest.raises(ValueError, match="unstable"):
        mc.NewtonSchulz((9.0, 9.0, 9.0))
    optax.contrib.muon(1.0, ns_coeffs=(9.0, 9.0, 9.0))


def aol():
    ours = mc.muon(1.0, orthogonalizer=mc.NewtonSchulz(preconditioning="aol"), **SAME)
    assert THEIRS["preconditioning"] == mc.NewtonSchulz().preconditioning
    assert close(ours, optax.contrib.muon(1.0, preconditioning="aol", **SAME))


def dtype_of_the_iteration():
    grads = {"w": MATRIX["w"].astype(jnp.bfloat16)}
    exact = 0.2 * 3 * polynomial_of(np.float64(grads["w"]), mc.NS_COEFFS["keller"])
    errors = {}
    for name, tx in {
        "ours": mc.muon(-1.0, **SAME | {"weight_decay": 0.0}),
        "theirs": optax.contrib.muon(-1.0, **SAME | {"weight_decay": 0.0}),
    }.items():
        update, _ = tx.update(grads, tx.init(grads), grads)
        errors[name] = np.abs(np.float64(update["w"]) - exact).max()
    assert errors["ours"] < 0.003 < errors["theirs"]
    assert mc.NewtonSchulz().dtype is None


def dimension_numbers():
    params = {"a": {"w": normal(0, 6, 9)}, "b": normal(1, 9, 6)}
    numbers = MuonDimensionNumbers(0, 1)
    assert "muon_weight_dimension_numbers" in THEIRS
    mc.muon(1.0, dimension_numbers={"a": numbers, "b": None}).init(params)


def eps():
    assert "eps" in THEIRS and "eps" not in OURS and "adam_eps" in OURS
    tiny = {"w": 1e-30 * MATRIX["w"]}
    for tx, is_orthogonal in (
        (mc.muon(1.0, weight_decay=0.0), True),
        (optax.contrib.muon(1.0), False),
    ):
        update, _ = tx.update(tiny, tx.init(tiny), tiny)
        assert bool(np.linalg.norm(update["w"]) > 0.1) == is_orthogonal


def momentum():
    assert close(mc.muon(1.0, **SAME), optax.contrib.muon(1.0, **SAME))
    nesterov = {"nesterov": True}
    assert not close(
        mc.muon(1.0, **SAME | nesterov), optax.contrib.muon(1.0, **SAME | nesterov)
    )


def rising_beta():
    assert THEIRS["beta"] == 0.95
    rising = optax.linear_schedule(0.85, 0.95, 300)
    assert close(mc.muon(1.0), mc.muon(1.0, beta=rising))
    assert not close(mc.muon(1.0), mc.muon(1.0, beta=0.95))


def heads():
    kernel = {"kernel": normal(0, 6, 2, 3)}
    params = {"query": kernel, "key": kernel}
    axes = {name: {"kernel": MuonDimensionNumbers(0, (1, 2))} for name in params}
    theirs = optax.contrib.muon(
        1.0, **SAME, muon_weight_dimension_numbers=axes, adam_weight_decay=0.1
    )
    updates = [
        tx.update(params, tx.init(params), params)[0]["query"]["kernel"]
        for tx in (theirs, mc.muon(1.0, **SAME, per_head=False), mc.muon(1.0, **SAME))
    ]
    np.testing.assert_allclose(updates[1], updates[0], atol=1e-4)
    assert not np.allclose(updates[2], updates[0], atol=1e-2)


def fused_kernels():
    def loss(p, x):
        query, key, value = jnp.moveaxis(jnp.tensordot(x, p["qkv"], 1), 1, 0)
        return jnp.sum(jax.nn.softmax(query @ key.mT) @ value @ p["out"])

    params = {"qkv": normal(0, 6, 3, 4), "out": normal(1, 4, 6)}
    reading = mc.read_model(loss, params, normal(2, 5, 6))
    given = {"qkv": MuonDimensionNumbers(0, (1, 2)), "out": None}
    theirs = optax.contrib.muon(
        1.0, **SAME, adam_weight_decay=0.1, muon_weight_dimension_numbers=given
    )
    ours = mc.muon(1.0, **SAME, model=reading, dimension_numbers=given)
    read = mc.muon(1.0, **SAME, model=reading, per_head=False)
    expected, whole, apart = (
        two_updates(x, params)["qkv"] for x in (theirs, ours, read)
    )
    np.testing.assert_allclose(whole, expected, atol=1e-4)
    assert not np.allclose(apart, expected, atol=1e-2)


def second_moment():
    assert (THEIRS["adam_b2"], OURS["adam_b2"]) == (0.999, 0.95)


def nadam():
    ours = mc.muon(1.0, weight_decay=0.0)
    theirs = dict(adam_b2=0.95, adam_weight_decay=0.0)
    assert close(ours, optax.contrib.muon(1.0, nesterov=False, **theirs), VECTOR)
    assert not close(ours, optax.contrib.muon(1.0, nesterov=True, **theirs), VECTOR)


def absent_options():
    absent = {"adam_eps_root", "adaptive"}
    assert absent <= THEIRS.keys() and not absent & OURS.keys()


def absent_norms():
    for name in ("spectral", "schatten"):
        optax.contrib.muon(1.0, preconditioning=name)
        with pytest.raises(ValueError, match="unknown preconditioning"):
            mc.NewtonSchulz(preconditioning=name)


def positions():
    optax.contrib.muon(1.0, (3.0, -3.2, 1.2), 5)
    with pytest.raises(TypeError):
        mc.muon(1.0, (3.0, -3.2, 1.2))


def routers():
    experts = {"up": jnp.ones((3, 8, 16)), "down": jnp.ones((3, 16, 8))}
    params = {"router": {"kernel": jnp.ones((8, 3))}, "experts": experts}
    state = optax.contrib.muon(1.0).init(params).inner_states["muon"].inner_state[0]
    assert isinstance(state.mu["router"]["kernel"], jax.Array)
    assert mc.param_labels(params)["router"] == {"kernel": "router"}
    assert not mc.matrix_mask(params)["router"]["kernel"]
    theirs = {"*router/kernel": mc.MatrixAxes(0, 1)}
    assert mc.matrix_mask(params, dimension_numbers=theirs)["router"]["kernel"]


def state():
    theirs = optax.contrib.muon(1.0).init(MATRIX)
    assert optax.tree.get(theirs, "ns_coeffs").size == 3
    kept = mc.scale_by_muon().init(MATRIX)
    assert kept.count == 0 and kept.unit == 1 and len(jax.tree.leaves(kept)) == 3
    chex.assert_trees_all_equal_shapes(kept.mu, MATRIX)


#: By how the line begins.
LINES = {
    "every rank-2 leaf": by_rank,
    "`consistent_rms": scale,
    "`weight_decay": decay,
    "`ns_coeffs": coefficients,
    '`preconditioning="aol"': aol,
    "iterates in the dtype": dtype_of_the_iteration,
    "heads of a kernel": heads,
    "a fused kernel of query, key and value": fused_kernels,
    "optax updates routers by Muon": routers,
    "`muon_weight_dimension_numbers": dimension_numbers,
    "`eps`": eps,
    "`beta=0.95`": rising_beta,
    "average momentum": momentum,
    "`adam_b2": second_moment,
    "`nesterov`": nadam,
    "`adam_eps_root`": absent_options,
    '`preconditioning="spectral"`': absent_norms,
    "settings may be positional": positions,
    "coefficients live": state,
}


@pytest.mark.parametrize("line", LINES)
def test_the_line_is_true(line):
    LINES[line]()


def test_every_line_has_its_assertion():
    told = [row for row in rows() if re.match(r"\S", row)]
    told = told[: told.index("coefficients live in the optimizer state") + 1]
    assert len(told) == len(LINES)
    assert all(row.startswith(line) for row, line in zip(told, LINES, strict=True))


def test_the_table_of_arguments_is_complete():
    page = (ROOT / "docs/from_optax.md").read_text()
    table = page.split("| argument of `optax.contrib.muon` |")[1].split("\n\n")[0]
    here: dict[str, str] = {}
    for line in table.splitlines()[2:]:
        theirs, ours = line.strip("| ").split(" | ")
        here |= dict.fromkeys(re.findall(r"`(\w+)`", theirs), ours)
    assert here.keys() == THEIRS.keys()
    settings = inspect.signature(mc.NewtonSchulz).parameters
    for name, ours in here.items():
        known = [name] if ours == "the same" else re.findall(r"\b(\w+)(?:=|`$)", ours)
        assert set(known) <= OURS.keys() | settings.keys(), name
        assert bool(known) == (ours != "none")
