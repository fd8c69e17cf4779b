"""The largest logits alongside a function's result, in which nothing changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import (
    are_unlike,
    differ,
    few,
    first_that,
    naive_logits,
    normal,
    one_at_a_time,
)
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_read_attention import WAYS
from variants import attend, B, cut, D, DIM, FLAT, H, logits, mixed, normed, T

import muonclip_jax as mc


X = normal(9, B, T, D)
CAUSAL = np.tril(np.ones((T, T), bool))
FIRST = np.arange(T) < 4


def _draw(seed):
    shapes = {"q": FLAT, "k": FLAT, "v": (D, D)}
    return {n: normal((seed, i), *x) for i, (n, x) in enumerate(shapes.items())}


def _assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def _leaf(stats):
    (leaf,) = jax.tree.leaves(stats)
    return np.asarray(leaf)


def _expected(p, x, mask=None, added=0):
    """In float64, over batch, queries and keys."""
    x = np.asarray(x, np.float64)
    query, key = (cut(x @ np.asarray(p[name], np.float64)) for name in "qk")
    return (naive_logits(query * DIM**0.5, key, mask) + added).max((0, 2, 3))


def _of_the_masked(p, x):
    return _expected({**p, "q": p["q"] / DIM**0.5}, x, CAUSAL)  # without the slopes


def _below_zero(p):
    """All logits of `abs(X)` are."""
    return {"q": abs(p["q"]), "k": -abs(p["k"]), "v": p["v"]}


def _distinguishes(p):
    """Whether masks and slopes change the numbers, and heads differ."""
    seen, every = _expected(p, X, CAUSAL), _expected(p, X)
    slopes = 2.0 ** -np.arange(1, H + 1)[:, None, None] * np.tril(FAR)
    return (
        differ(seen, every)
        and not np.allclose(_expected(p, X, FIRST), every, rtol=0.01)
        and not np.allclose(_expected(p, X, CAUSAL, -slopes), seen, rtol=0.01)
        and all(map(are_unlike, (seen, every, _expected(_below_zero(p), abs(X)))))
    )


FAR = np.arange(T)[:, None] - np.arange(T)
PARAMS = first_that(_distinguishes, _draw)

EXPECTED = {
    "of data": _expected,
    "masked": _of_the_masked,
    "in a branch": _expected,
    "in two blocks": lambda p, x: _expected(p, x, FIRST),
    "stock": _of_the_masked,
}


@pytest.mark.parametrize("way", few(list(WAYS), "masked"))
def test_nothing_changes_however_attention_is_computed(way):
    def loss(p, x):
        return jnp.sum(WAYS[way](p, x) ** 2)

    recorded = jax.value_and_grad(mc.record_attention(loss), has_aux=True)
    with jax.disable_jit():  # operation by operation
        (value, stats), grads = recorded(PARAMS, X)
        plain = jax.value_and_grad(loss)(PARAMS, X)
    np.testing.assert_allclose(_leaf(stats), EXPECTED[way](PARAMS, X), rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, (value, grads), plain)


def _loss(p, x):
    return jnp.sum(WAYS["stock"](p, x) ** 2)


def _jitted(p, x):
    return jax.jit(_loss)(p, x)


def _remat(p, x):
    policy = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(_loss, policy=policy)(p, x)


def _custom_jvp(p, x):
    f = jax.custom_jvp(_loss)
    f.defjvp(lambda x, t: (_loss(*x), 3 * jax.jvp(_loss, x, t)[1]))
    return f(p, x)


def _custom_vjp(p, x):
    f = jax.custom_vjp(_loss)

    def backward(inputs, cotangent):
        return jax.tree.map(
            lambda g: 3 * cotangent * g, jax.grad(_loss, (0, 1))(*inputs)
        )

    f.defvjp(lambda p, x: (_loss(p, x), (p, x)), backward)
    return f(p, x)


@pytest.mark.more
@pytest.mark.parametrize(
    "call", few([_jitted, _remat, _custom_jvp, _custom_vjp], _remat)
)
def test_inside_calls_whose_rules_stay(call):
    recorded = jax.value_and_grad(mc.record_attention(call), has_aux=True)
    (_, stats), grads = jax.jit(recorded)(PARAMS, X)
    np.testing.assert_allclose(_leaf(stats), EXPECTED["stock"](PARAMS, X), rtol=1e-5)
    plain = jax.grad(call)(PARAMS, X)
    jax.tree.map(_assert_close, grads, plain)


def test_remat_stays():
    text = str(jax.make_jaxpr(mc.record_attention(_remat))(PARAMS, X))
    # JAX 0.10 writes the policy as the name of a class.
    policy = text.lower().replace("_", "")
    assert text.count("policy=") == 1 and "dotssaveable" in policy


def test_a_loop_of_unknown_length():
    def fun(p, x):
        def step(x):
            return normed(x + WAYS["masked"](p, x).mean(2)) - 9

        return jax.lax.while_loop(lambda x: x.max() > 0, step, x)

    _, stats = mc.record_attention(fun)(PARAMS, X)  # one trip
    np.testing.assert_allclose(_leaf(stats), EXPECTED["masked"](PARAMS, X), rtol=1e-5)


def _on_negative_x(p, x):
    """Runs once."""
    return jax.lax.while_loop(
        lambda x: x.max() > 0, lambda x: -normed(x + _nonnegative(p, x)), x
    )


def _nonnegative(p, x):
    return jnp.abs(WAYS["of data"](p, x)).mean(2)


def _in_one_of_two(p, x):
    """The second trip takes the other branch."""

    def step(i, out):
        return out + jax.lax.cond(i == 0, _nonnegative, lambda p, x: x, p, x)

    return jax.lax.fori_loop(0, 2, step, x)


@pytest.mark.parametrize("fun", [_on_negative_x, _in_one_of_two])
def test_largest_logits_below_zero(fun):
    """Nothing is larger, not even where no logits are."""
    params = _below_zero(PARAMS)
    expected = _expected(params, abs(X))
    assert (expected < -1).all()
    _, stats = jax.jit(mc.record_attention(fun))(params, abs(X))
    np.testing.assert_allclose(_leaf(stats), expected, rtol=1e-5)


OVER_HEADS = {
    "mapped": jax.lax.map,
    "scanned": lambda fun, heads: jax.lax.scan(lambda c, x: (c, fun(x)), 0, heads)[1],
    "vmapped": lambda fun, heads: jax.vmap(fun)(heads),
}


@pytest.mark.parametrize("name", few(OVER_HEADS, "mapped"))
def test_heads_one_by_one_have_a_maximum_each(name):
    def weights(heads):
        return jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", *heads))

    def fun(p, x):
        heads = tuple(jnp.moveaxis(cut(x @ p[name]), 2, 0) for name in "qk")
        return jnp.einsum(
            "hbqk,bkd->bqhd", OVER_HEADS[name](weights, heads), x @ p["v"]
        )

    expected = _expected(PARAMS, X)
    _, stats = jax.jit(mc.record_attention(fun))(PARAMS, X)
    np.testing.assert_allclose(_leaf(stats), expected, rtol=1e-5)


AFTER_THE_MAXIMUM = {
    "divided": (lambda s: jnp.exp(s / 3), 1 / 3),
    "multiplied": (lambda s: jnp.exp(0.25 * s), 0.25),
    "twice": (lambda s: jnp.exp(4 * (s / 3)), 4 / 3),
    "to base 2": (lambda s: jnp.exp2(s / 3), np.log(2) / 3),
    "to base 5": (lambda s: 5**s, np.log(5)),
}


def test_a_sink_in_front_of_the_logits_of_some_keys_is_no_logit():
    def loss(p, x):
        of_keys = logits(p, x)[..., 2:]
        sink = jnp.full((*of_keys.shape[:-1], 1), 1e3)
        weights = jax.nn.softmax(jnp.concatenate([sink, of_keys], -1))
        return jnp.sum(mixed(weights[..., 1:], (x @ p["v"])[:, 2:]) ** 2)

    seen = np.arange(T) > 1
    params = first_that(lambda p: differ(_expected(p, X, seen), _expected(p, X)), _draw)
    _, stats = mc.record_attention(loss)(params, X)
    _assert_close(_leaf(stats), _expected(params, X, seen))


@pytest.mark.parametrize("name", few(AFTER_THE_MAXIMUM, "divided", "to base 2"))
def test_a_temperature_after_the_maximum(name):
    """Logits are what is exponentiated to base e: of it the largest is subtracted."""
    exponential, factor = AFTER_THE_MAXIMUM[name]

    def fun(p, x):
        s = logits(p, x)
        weights = exponential(s - s.max(-1, keepdims=True))
        return mixed(weights / weights.sum(-1, keepdims=True), x @ p["v"])

    before = _expected(PARAMS, X)
    assert differ(factor * before, before) and differ(factor * before, before / factor)
    _, stats = jax.jit(mc.record_attention(fun))(PARAMS, X)
    np.testing.assert_allclose(_leaf(stats), factor * before, rtol=1e-5)


@pytest.mark.more
@pytest.mark.parametrize("reverse", [False, True])
def test_a_row_for_every_layer_of_a_scan(reverse):
    params = {n: jnp.stack([PARAMS[n], PARAMS[n] / 2]) for n in PARAMS}

    def layer(x, p):
        return normed(x + WAYS["stock"](p, x).mean((2, 3), keepdims=True)[..., 0]), None

    def loss(params, x):
        return jax.lax.scan(jax.checkpoint(layer), x, params, reverse=reverse)[0].sum()

    value, stats = jax.jit(mc.record_attention(loss))(params, X)
    assert value == pytest.approx(float(loss(params, X)), rel=1e-5)
    x, rows = X, [None, None]
    for i in [1, 0] if reverse else [0, 1]:
        p = {n: params[n][i] for n in params}
        rows[i] = EXPECTED["stock"](p, np.asarray(x))
        x, _ = layer(x, p)
    np.testing.assert_allclose(_leaf(stats), rows, rtol=1e-4)


LONG = normal(7, 2, 70, D)  # as many keys as a vector register wants
SEEN = np.tril(np.ones((70, 70), bool))


def _by_exponentials(logits):
    weights = jnp.exp(logits / 100)
    return weights / weights.sum(-1, keepdims=True)


WEIGHTS = {
    "plain": jax.nn.softmax,
    "masked": lambda x: jax.nn.softmax(jnp.where(SEEN, x, -jnp.inf)),
    "capped": lambda x: jax.nn.softmax(jnp.where(SEEN, 9 * jnp.tanh(x / 9), -1e9)),
    "by exponentials": _by_exponentials,
}


@pytest.mark.parametrize(
    "jit, loop, name", one_at_a_time([False, True], [False, True], WEIGHTS)
)
def test_a_nan_among_many_logits_is_in_the_statistic(name, loop, jit):
    def attended(p, x):
        return mixed(WEIGHTS[name](logits(p, x)), x @ p["v"]).sum()

    def each(p, x):
        return jax.lax.map(lambda row: attended(p, row[None]), x).sum()

    record = mc.record_attention(each if loop else attended)
    record = jax.jit(record) if jit else record
    assert np.isfinite(_leaf(record(PARAMS, LONG)[1])).all()
    broken = LONG.at[0, 40, 3].set(jnp.nan)
    assert np.isnan(_leaf(record(PARAMS, broken)[1])).all()


def test_masked_logits_in_half_precision():
    """A row that sees nothing has the maximum -inf, and -inf times zero is NaN."""

    mask = np.tri(T, k=-1, dtype=bool)

    def fun(p, x):
        weights = jax.nn.softmax(jnp.where(mask, logits(p, x), -jnp.inf))
        return mixed(jnp.nan_to_num(weights), x @ p["v"])

    halves = jax.tree.map(lambda x: jnp.asarray(x, jnp.float16), (PARAMS, X))
    _, stats = jax.jit(mc.record_attention(fun))(*halves)
    expected = _expected(*jax.tree.map(lambda x: x.astype(jnp.float32), halves), mask)
    # Products and sums of float16 logits, of up to 2**-11 each.
    np.testing.assert_allclose(_leaf(stats), expected, rtol=2e-2)


def test_mapped_from_outside():
    each = jax.vmap(mc.record_attention(_loss), in_axes=(None, 0))
    _, stats = each(PARAMS, jnp.stack([X, 2 * X]))
    one = EXPECTED["stock"](PARAMS, X)
    np.testing.assert_allclose(_leaf(stats), [one, 4 * one], rtol=1e-5)


def test_auxiliary_results_and_arguments_that_are_no_arrays():
    def loss(p, x, name, *, scale):
        return _loss(p, x) * scale, {"name": name, "mean": x.mean()}

    out = mc.record_attention(loss, has_aux=True)(PARAMS, X, "this", scale=2)
    value, (aux, stats) = out
    assert value == pytest.approx(2 * float(_loss(PARAMS, X)), rel=1e-5)
    assert set(aux) == {"name", "mean"} and set(stats) == {"max_logits"}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, rngs):
        return self.dropout(self.attention(self.norm(x)), rngs=rngs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Extras:
    metric: nnx.Module
    owner: nnx.Module


X_NET = normal(3, 2, 5, 8)


def _loss_of_objects(net, at, x, *, extras):
    rngs, count = at["rngs"]
    assert extras.owner.rngs is rngs
    value = jnp.sum(net(x, rngs) ** 2)
    extras.metric.update(values=value)
    count[...] += 1
    net.seen = nnx.Intermediate(x.mean())
    net.calls = 1
    return value


def _plain(fun):
    return lambda *args, **kwargs: (fun(*args, **kwargs), {})


def _trained(record, loss, objects):
    """Gradients and states after two steps with dropout."""

    @nnx.jit
    def step(net, at, x, extras):
        # `nnx.grad` takes nothing by keyword alone.
        grad = nnx.value_and_grad(
            lambda *args: record(loss)(*args[:-1], extras=args[-1]), has_aux=True
        )
        (value, _), grads = grad(net, at, x, extras)
        return value, grads

    found = [step(*objects) for _ in range(2)]

    def as_numbers(x):
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    return jax.tree.map(as_numbers, (found, nnx.state(objects)))


def _objects():
    net, rngs = Net(nnx.Rngs(0)), nnx.Rngs(1)
    owner = nnx.Module()
    owner.rngs = rngs
    extras = Extras(nnx.metrics.Average(), owner)
    return net, {"rngs": (rngs, nnx.Variable(jnp.zeros(())))}, X_NET, extras


@pytest.mark.more
def test_what_changes_in_objects_of_nnx_among_all_arguments_is_kept():
    """Statistics, keys, metrics, counters, new attributes; one object in two places."""
    plain, recorded = _objects(), _objects()
    expected = _trained(_plain, _loss_of_objects, plain)
    actual = _trained(mc.record_attention, _loss_of_objects, recorded)
    jax.tree.map(_assert_close, actual, expected)
    (first, _), (second, _) = actual[0]
    assert first != second and recorded[0].calls == 1
    # Eagerly, too.
    *args, extras = recorded
    _, stats = mc.record_attention(_loss_of_objects)(*args, extras=extras)
    assert stats["attention"]["max_logits"].shape == (2,)
    assert recorded[1]["rngs"][1][...] == 3


@pytest.mark.more
def test_objects_that_are_returned_are_those_that_were_given():
    def fun(net, rngs, x, *, again):
        assert again["net"] is net
        made = nnx.Linear(8, 8, rngs=rngs)
        return net(x, rngs).sum(), {"net": net, "made": [made, made], "name": "this"}

    net, rngs = Net(nnx.Rngs(0)), nnx.Rngs(1)
    record = mc.record_attention(fun, has_aux=True)
    _, (aux, _) = record(net, rngs, X_NET, again={"net": net})
    first, second = aux["made"]
    assert aux["net"] is net and first is second and aux["name"] == "this"
    expected = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(first.kernel[...], expected.kernel[...])


def test_reading_changes_no_object():
    net, at, x, extras = _objects()
    before = jax.tree.map(lambda x: x, nnx.state((net, extras.metric, at["rngs"][1])))
    reading = mc.read_model(_loss_of_objects, net, at, x, extras=extras)
    assert [layer.path for layer in reading.attention] == ["attention"]
    after = nnx.state((net, extras.metric, at["rngs"][1]))
    assert not hasattr(net, "seen")
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_an_object_of_an_outer_trace_that_stays_as_it_is():
    attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    record = mc.record_attention(lambda layer, x: layer(x).sum())
    value, _ = jax.jit(lambda x: record(attention, x))(X_NET)
    assert value == pytest.approx(float(attention(X_NET).sum()), rel=1e-5)


def test_a_cap_that_is_no_number():
    def loss(p, x):
        capped = p["cap"] * jnp.tanh(logits(p, x) / p["cap"])
        return attend(capped, x @ p["v"]).sum()

    _, stats = mc.record_attention(loss)({**PARAMS, "cap": jnp.asarray(5.0)}, X)
    np.testing.assert_allclose(_leaf(stats), _expected(PARAMS, X), rtol=1e-5)


def _mesh(*shape):
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def _weighed(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def _on_both(spec, axes=None):
    """Sharded attention; with `axes`, one `shard_map` for each of them."""
    run = _weighed
    for names, own in axes or [(("data", "model"), spec)]:
        run = jax.shard_map(
            run,
            mesh=_mesh(2, 2) if names != ("model",) else None,
            in_specs=(own,) * 3,
            out_specs=own,
            axis_names={*names},
        )
    return run


def _layer(attend, x, p):
    heads = (jnp.einsum("btd,dhk->bthk", x, p[n]) for n in "qkv")
    return normed(x + attend(*heads).reshape(x.shape))


def _scanned(attend, params, x):
    return jax.lax.scan(lambda x, p: (_layer(attend, x, p), None), x, params)[0]


def _picked(attend, params, x):
    def step(i, x):
        return _layer(attend, x, jax.tree.map(lambda p: p[i], params))

    return jax.lax.fori_loop(0, 2, step, x)


def _in_a_branch(attend, params, x):
    def step(x, p):
        layer = jax.checkpoint(functools.partial(_layer, attend))
        return jax.lax.cond(x[0, 0, 0] < 1e9, layer, lambda x, p: x, x, p), None

    return jax.lax.scan(step, x, params)[0]


def _until(attend, params, x):
    def step(state):
        i, x = state
        return i + 1, _layer(attend, x, jax.tree.map(lambda p: p[0], params))

    return jax.lax.while_loop(lambda state: state[0] < 2, step, (0, x))[1]


SHARDED = P("data", None, "model")
NESTED = [(("model",), P(None, None, "model")), (("data",), P("data"))]
LOOPS = {
    "scanned": (_scanned, SHARDED, None),
    "batches alone": (_scanned, P("data"), None),
    "picked": (_picked, SHARDED, None),
    "in a branch": (_in_a_branch, SHARDED, None),
    "until": (_until, SHARDED, None),
    "nested": (_scanned, SHARDED, NESTED),
}


@pytest.mark.parametrize("name", few(list(LOOPS), "batches alone", "until", "nested"))
def test_shard_map_inside_a_loop_over_layers(name):
    run, *sharded = LOOPS[name]
    shape = (2, D, 2, D // 2)
    params = {n: normal(i, *shape, scale=0.4) for i, n in enumerate("qkv")}
    x, rows = normal(4, 2, T, D), []
    attend = _on_both(*sharded)
    record = jax.jit(mc.record_attention(functools.partial(run, attend)))
    out, stats = record(params, x)
    y = x
    for i in (0, 0) if run is _until else (0, 1):
        p = jax.tree.map(lambda p: p[i], params)  # noqa: B023
        query, key = (np.einsum("btd,dhk->bthk", y, p[n]) for n in "qk")
        rows.append(naive_logits(query * (D // 2) ** 0.5, key).max((0, 2, 3)))
        y = _layer(_weighed, y, p)
    expected = np.max(rows, 0) if run is _until else rows
    np.testing.assert_allclose(_leaf(stats), expected, rtol=1e-4)
    np.testing.assert_allclose(out, y, rtol=1e-4, atol=1e-5)
    # One device may have the NaN, which a maximum over devices loses.
    broken = record(params, x.at[1, 2, 3].set(jnp.nan))[1]
    assert np.isnan(_leaf(broken)).all()


def test_params_by_name_are_asked_for_in_words():
    loss = mc.record_attention(lambda params, x: jnp.sum(x @ params))
    with pytest.raises(TypeError, match="params as its first argument"):
        loss(params=jnp.ones((2, 2)), x=jnp.ones((3, 2)))
