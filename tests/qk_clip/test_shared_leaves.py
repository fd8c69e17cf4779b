"""Leaves that are query and key, or that several layers share: `min(S, tau)` again.

Every layer has an input of its own, so that its logits depend on its own leaves alone.
"""

import dataclasses
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import mesh_of, more, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

T, D, H, E = 5, 6, 4, 3
X = [normal((9, i), T, D) for i in range(3)]
FLAT, BIAS = (D, H * E), (H * E,)


def cut(y, heads=H):
    return y.reshape(T, heads, -1)


def product(query, key):
    key = jnp.repeat(key, query.shape[1] // key.shape[1], 1)
    return jnp.einsum("qhe,khe->hqk", query, key)


def leaf(name, ndim=2, heads=H, **how):
    return mc.HeadLeaf("/" + name, ndim, split=(heads, -1), **how)


@dataclasses.dataclass
class Case:
    """Layers with leaves in common.

    - `logits`: from params to `(heads, queries, keys)` of each layer, by its path.
    - `layers`: by path, the leaves of query and key, and those scaled alone.
    - `joint`: the layers, or the heads, that are clipped by the smallest gamma of all.
    """

    shapes: dict[str, tuple[int, ...]]
    logits: Callable[[dict], dict[str, jax.Array]]
    layers: dict[str, tuple]
    joint: tuple[int, ...] = ()

    def attention(self):
        return [mc.AttentionLayer(path, *of) for path, of in self.layers.items()]

    def params(self):
        shapes = {**self.shapes, "v": (D, D)}
        return {k: normal((1, i), *s) for i, (k, s) in enumerate(shapes.items())}

    def loss(self, params):
        pairs = zip(self.logits(params).values(), X, strict=False)
        return sum(jnp.sum(jax.nn.softmax(y) @ (x @ params["v"])) for y, x in pairs)

    def expected(self, rows, tau):
        gamma = np.minimum(1, tau / rows)
        if self.joint:
            gamma = gamma.min(self.joint, keepdims=True)
        return rows * gamma


def tied(p):
    y = X[0] @ p["qk"]
    return {"a": product(cut(y + p["bq"]), cut(y + p["bk"]))}


def tied_in_part(p):
    """Query heads 0 to 3 and key heads 2 to 5 of one kernel: 2 and 3 are both."""
    y = cut(X[0] @ p["w"], H + 2)
    return {"a": product(y[:, :H], y[:, 2:])}


def tied_by_groups(p):
    """The first two query heads are the keys of two groups."""
    y = cut(X[0] @ p["q"])
    return {"a": product(y, y[:, :2])}


def keys_of_three_layers(p):
    return {
        f"a{i}": product(cut(x @ p[f"q{i}"]), cut(X[0] @ p["k"] + p["b"], 2))
        for i, x in enumerate(X)
    }


def of_pairs(*pairs, joint=()):
    """Layers one after the other, each with the leaf of its query and of its key."""

    def logits(p):
        layers = enumerate(zip(X, pairs, strict=False))
        return {
            f"a{i}": product(cut(x @ p[q]), cut(x @ p[k])) for i, (x, (q, k)) in layers
        }

    shapes = dict.fromkeys(itertools.chain(*pairs), FLAT)
    layers = {f"a{i}": pair(*names) for i, names in enumerate(pairs)}
    return Case(shapes, logits, layers, joint)


def query_of_two_products(p):
    """Keys, and positions that all heads share, as those of Shaw et al."""
    query = cut(X[0] @ p["q"])
    positions = p["r"][:, None]
    return {"a": product(query, cut(X[0] @ p["k"])) + product(query, positions)}


def normed(y):
    return y / jnp.sqrt(jnp.mean(y * y, -1, keepdims=True))


def one_gain_of_all_query_heads(p):
    return {"a": product(normed(cut(X[0] @ p["q"])) * p["g"], cut(X[0] @ p["k"]))}


def one_gain_and_keys_of_groups(p):
    return {"a": product(normed(cut(X[0] @ p["q"])) * p["g"], cut(X[0] @ p["k"], 2))}


GAIN = (mc.HeadLeaf("/g", 1, axis=None),)


def head_part(name, heads, start, count=H):
    part = (-2, slice(start, start + count))
    return mc.HeadLeaf("/" + name, 2, split=(heads, E), part=part)


def pair(q, k, **key):
    return (leaf(q),), (leaf(k, **key),)


CASES = {
    "tied, biases apart": Case(
        {"qk": FLAT, "bq": BIAS, "bk": BIAS},
        tied,
        {"a": ((leaf("qk"), leaf("bq", 1)), (leaf("qk"), leaf("bk", 1)))},
    ),
    "keys of three layers and two groups": Case(
        {"k": (D, 2 * E), "b": (2 * E,)} | {f"q{i}": FLAT for i in range(3)},
        keys_of_three_layers,
        {
            f"a{i}": ((leaf(f"q{i}"),), (leaf("k", heads=2), leaf("b", 1, heads=2)))
            for i in range(3)
        },
    ),
    "query of two layers": of_pairs(("q", "k0"), ("q", "k1")),
    "all of two layers": of_pairs(("q", "k"), ("q", "k"), joint=(0,)),
    "query and key swapped": of_pairs(("q", "k"), ("k", "q"), joint=(0,)),
    # The middle one has the query of the first, and the key of the last.
    "nothing left for one": of_pairs(
        ("q0", "k0"), ("q0", "k2"), ("q2", "k2"), joint=(0,)
    ),
    "query of two products": Case(
        {"q": FLAT, "k": FLAT, "r": (T, E)},
        query_of_two_products,
        {"a": ((leaf("q"),), (leaf("k"),), (leaf("q"),))},
    ),
    "one gain of all query heads": Case(
        {"q": FLAT, "k": FLAT, "g": (E,)},
        one_gain_of_all_query_heads,
        {"a": (GAIN, (leaf("k"),))},
    ),
    "one gain, and keys of groups": Case(
        {"q": FLAT, "k": (D, 2 * E), "g": (E,)},
        one_gain_and_keys_of_groups,
        {"a": (GAIN, (leaf("k", heads=2),))},
        joint=(1,),
    ),
    "tied by groups": Case(
        {"q": FLAT},
        tied_by_groups,
        {"a": ((leaf("q"),), (head_part("q", H, 0, 2),))},
        joint=(1,),
    ),
}


def rows_of(case, params):
    return np.array([y.max((1, 2)) for y in case.logits(params).values()])


def threshold_of(rows):
    """Some heads are above it, some are not, in every layer that can have both."""
    tau = float(np.median(rows))
    assert 0 < tau < rows.max()
    return tau


def stats_of(case, rows):
    pairs = zip(case.layers, rows, strict=True)
    return {path: {"max_logits": jnp.asarray(row)} for path, row in pairs}


def step_at_rest(params, stats, tau, **options):
    tx = mc.qk_clip(tau, **options)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, state = tx.update(zeros, tx.init(params), params, attention_stats=stats)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("alpha", [0.3, more(1.0)])
@pytest.mark.parametrize("name", CASES)
def test_layers_by_hand(name, alpha):
    case = CASES[name]
    params = case.params()
    rows = rows_of(case, params)
    tau = threshold_of(rows)
    options = {"attention": case.attention(), "alpha": alpha}
    after, state = step_at_rest(params, stats_of(case, rows), tau, **options)
    expected = case.expected(rows, tau)
    np.testing.assert_allclose(rows_of(case, after), expected, rtol=1e-4)
    if state.gamma.size == rows.size:  # heads that share all that is scaled are one
        assert int(state.num_clipped) == (expected < rows * (1 - 1e-6)).sum()
    clipped = mc.clip_qk(params, stats_of(case, rows), tau, **options)
    # The sum of a weight and its update is rounded, too.
    for name in params:
        np.testing.assert_allclose(clipped[name], after[name], rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_layers_of_a_reading(name):
    case = CASES[name]
    params = case.params()
    reading = mc.read_model(case.loss, params)
    assert not reading.refused
    _, stats = mc.record_attention(case.loss)(params)
    rows = rows_of(case, params)
    # Calls with the same leaves are one layer, of which there is the maximum.
    for row in jax.tree.leaves(stats):
        assert any(np.allclose(row, x, rtol=1e-5) for x in (*rows, rows.max(0)))
    tau = threshold_of(rows)
    after, _ = step_at_rest(params, stats, tau, model=reading, alpha=0.3)
    expected = case.expected(rows, tau)
    np.testing.assert_allclose(rows_of(case, after), expected, rtol=1e-4)
    np.testing.assert_array_equal(after["v"], params["v"])


def test_keys_that_stay_keep_their_bits():
    case = CASES["keys of three layers and two groups"]
    params = case.params()
    rows = rows_of(case, params)
    options = {"attention": case.attention()}
    after, _ = step_at_rest(params, stats_of(case, rows), 0.1, **options)
    for name in "kb":
        np.testing.assert_array_equal(after[name], params[name])
    alone = np.where(np.arange(3)[:, None] == 1, rows, 0)
    after, _ = step_at_rest(params, stats_of(case, alone), 0.1, **options)
    changed = [name for name in params if (after[name] != params[name]).any()]
    assert changed == ["q1"]


def test_the_table_of_a_reading_says_what_stays():
    said = {
        "keys of three layers and two groups": "query q0; the key stays: k, b",
        "query of two layers": "the query stays: q; key k1",
        "tied, biases apart": "query qk, bq; key qk, bk",
        # The clip scales both, since either side alone is of several heads or layers.
        "tied by groups": "query q; key q",
        "nothing left for one": "query q2; key k2",
    }
    for name, text in said.items():
        case = CASES[name]
        table = str(mc.read_model(case.loss, case.params()))
        assert text in table.replace("/", ""), table


def test_queries_that_groups_of_keys_share_stay():
    def rows_of(p):
        query = jnp.repeat(cut(X[0] @ p["q"], 2), 2, 1)
        y = product(query, cut(X[0] @ p["k"]))
        return y.max((1, 2)), jnp.sum(jax.nn.softmax(y) @ (X[0] @ p["v"]))

    params = {"q": normal(0, D, 2 * E), "k": normal(1, *FLAT), "v": normal(2, D, D)}
    reading = mc.read_model(lambda p: rows_of(p)[1], params)
    rows = np.asarray(rows_of(params)[0])
    _, stats = mc.record_attention(lambda p: rows_of(p)[1])(params)
    tau = threshold_of(rows)
    after = mc.clip_qk(params, stats, tau, model=reading)
    np.testing.assert_allclose(rows_of(after)[0], np.minimum(rows, tau), rtol=1e-4)
    np.testing.assert_array_equal(after["q"], params["q"])


def tied_and_with_a_key_that_nothing_scales(p):
    query = cut(X[0] @ p["w"])
    return product(query, query), product(query, normed(cut(X[0] @ p["k"])))


def test_products_that_ask_for_different_shares_are_refused():
    def in_one_softmax(p):
        logits = sum(tied_and_with_a_key_that_nothing_scales(p))
        return jnp.sum(jax.nn.softmax(logits) @ (X[0] @ p["v"]))

    def in_two_layers(p):
        every = tied_and_with_a_key_that_nothing_scales(p)
        return sum(jnp.sum(jax.nn.softmax(y) @ (X[0] @ p["v"])) for y in every)

    params = {"w": normal(0, *FLAT), "k": normal(1, *FLAT), "v": normal(2, D, D)}
    (refused,) = mc.read_model(in_one_softmax, params).refused
    assert "which ask for different scales" in refused
    reading = mc.read_model(in_two_layers, params)
    with pytest.raises(ValueError, match="no scaling of 'w'"):
        mc.qk_clip(model=reading).init(params)
    assert "no scaling of 'w'" in str(reading)


def test_a_refused_call_of_a_layer_that_is_read_is_refused():
    def loss(p):
        one, two = (product(cut(x @ p["q"]), cut(x @ p["k"])) for x in X[:2])
        weights = jax.nn.softmax(one) + jax.nn.softmax(jnp.sinh(two))
        return jnp.sum(weights @ (X[0] @ p["v"]))

    shapes = {"q": FLAT, "k": FLAT, "v": (D, D)}
    reading = mc.read_model(loss, {k: jnp.ones(s) for k, s in shapes.items()})
    assert len(reading.attention) == 1
    (refused,) = reading.refused
    assert "sinh" in refused and "not linear" in refused


def test_heads_that_are_keys_of_other_heads_stay_below():
    """Entries that are a query of one head and a key of another take both."""
    case = Case(
        {"w": (D, (H + 2) * E)},
        tied_in_part,
        {"a": ((head_part("w", H + 2, 0),), (head_part("w", H + 2, 2),))},
    )
    params = case.params()
    rows = rows_of(case, params)
    for i in range(H):
        # One head alone is above.
        seen = np.where(np.arange(H) == i, rows, -1.0)
        tau = float(rows[0, i]) / 3
        stats = stats_of(case, seen)
        after, _ = step_at_rest(params, stats, tau, attention=case.attention())
        found = rows_of(case, after)
        np.testing.assert_allclose(found[0, i], tau, rtol=1e-4)
        assert (found <= rows * (1 + 1e-6)).all()


def in_a_scan(p, run):
    """Three layers, of one key: the largest logits of each, or what weighs values."""

    def layer(carry, q):
        y = product(cut(X[0] @ q), cut(X[0] @ p["k"]))
        return carry + jnp.sum(jax.nn.softmax(y) @ (X[0] @ p["v"])), y.max((1, 2))

    return jax.lax.scan(layer, 0.0, p["q"])[run]


@pytest.mark.parametrize("is_read", [True, False])
def test_a_key_of_all_layers_of_a_stack(is_read):
    params = {"q": normal(0, 3, *FLAT), "k": normal(1, *FLAT), "v": normal(2, D, D)}
    rows = np.asarray(in_a_scan(params, 1))
    tau = threshold_of(rows)
    options = {"attention": [mc.AttentionLayer("", *pair("q", "k"))]}
    stats = {"max_logits": rows}
    if is_read:

        def loss(p):
            return in_a_scan(p, 0)

        options = {"model": mc.read_model(loss, params)}
        _, stats = mc.record_attention(loss)(params)
    after, _ = step_at_rest(params, stats, tau, alpha=0.3, **options)
    np.testing.assert_allclose(in_a_scan(after, 1), np.minimum(rows, tau), rtol=1e-4)
    np.testing.assert_array_equal(after["k"], params["k"])


def test_tied_kernels_of_a_stack():
    params = {"w": normal(0, 3, *FLAT)}

    def rows_of(p):
        heads = [cut(X[0] @ w) for w in p["w"]]
        return np.array([product(y, y).max((1, 2)) for y in heads])

    rows = rows_of(params)
    tau = threshold_of(rows)
    layer = mc.AttentionLayer("", *pair("w", "w"))
    stats = {"max_logits": rows}
    after, _ = step_at_rest(params, stats, tau, alpha=0.9, attention=[layer])
    np.testing.assert_allclose(rows_of(after), np.minimum(rows, tau), rtol=1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ["all of two layers", "tied by groups"])
def test_layers_clipped_together_on_a_mesh(name, kind):
    case = CASES[name]
    params = case.params()
    rows = rows_of(case, params)
    options = {"attention": case.attention()}
    expected, _ = step_at_rest(params, stats_of(case, rows), 1.0, **options)
    mesh = mesh_of(kind, x=2)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, NamedSharding(mesh, P(None, "x")))
        stats = jax.device_put(stats_of(case, rows), NamedSharding(mesh, P("x")))
        step = jax.jit(lambda p, s: step_at_rest(p, s, 1.0, **options)[0])
        found = step(placed, stats)
    for name in params:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)


@pytest.mark.parametrize(
    "roles",
    [
        pytest.param(("w", "w", "w"), id="one leaf in three roles"),
        pytest.param(("wv", "w", "v"), id="query is the key, and the rotary query"),
        pytest.param(("w", "v", "wv"), id="query and key are rotary queries"),
        pytest.param(("w", "wv", "w"), id="query is the rotary query, part of the key"),
    ],
)
def test_roles_that_no_share_of_gamma_is_right_for(roles):
    """`w`, `v` appear as `w*v` or `w*w` in one product and alone in another."""
    leaves = [tuple(leaf(name) for name in names) for names in roles]
    query, key, alone = leaves
    layer = mc.AttentionLayer("body/attn", query, key, alone)
    params = {"w": normal(0, D, H * E), "v": normal(1, D, H * E)}
    named = ", ".join(repr(name) for name in sorted({*"".join(roles)}, reverse=True))
    message = f"no scaling of {named} brings .*'body/attn'"
    with pytest.raises(ValueError, match=message):
        mc.muonclip(0.1, attention=[layer]).init(params)
    with pytest.raises(ValueError, match=message):
        stats = {"body": {"attn": {"max_logits": jnp.ones(H)}}}
        mc.clip_qk(params, stats, attention=[layer])
