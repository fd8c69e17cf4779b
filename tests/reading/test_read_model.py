"""What a reading says of every parameter, for small models written out here."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import is_numbers
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


B, T, D, V = 2, 5, 8, 11
TOKENS = jax.ShapeDtypeStruct((B, T), jnp.int32)
X = jax.ShapeDtypeStruct((B, T, D), jnp.float32)


def shapes(**params):
    return {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in params.items()}


def said(fun, params, *args):
    """Labels, and of matrices the axes in their place: inputs, then outputs."""
    reading = mc.read_model(fun, params, *args)
    found = {}
    for (path, label), numbers in zip(
        jax.tree_util.tree_leaves_with_path(reading.labels),
        jax.tree.leaves(
            reading.dimension_numbers,
            is_leaf=is_numbers,
        ),
        strict=True,
    ):
        name = "/".join(str(getattr(k, "key", getattr(k, "name", k))) for k in path)
        found[name] = label if numbers is None else tuple(numbers)
    return found


def normed(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def cross_entropy(logits):
    return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])


@pytest.mark.parametrize("is_loss", [True, False])
def test_hidden_states_are_no_output_of_a_head(is_loss):
    def hidden(p, x):
        for name in ("a", "b"):
            x = x + jax.nn.relu(normed(x) @ p[name])
        return jnp.mean(x**2) if is_loss else x

    assert said(hidden, shapes(a=(D, D), b=(D, D)), X) == {"a": (0, 1), "b": (0, 1)}


def test_a_weight_that_is_applied_both_ways_has_the_inputs_of_its_first_use():
    def there_and_back(p, x):
        return jax.nn.relu(jax.nn.relu(x @ p["w"]) @ p["w"].T)

    params = shapes(w=(D, 6), o=(D, 4))
    found = said(lambda p, x: jnp.sum(there_and_back(p, x) @ p["o"]), params, X)
    assert found == {"w": (0, 1), "o": "head"}
    # An autoencoder's weight writes the output, too.
    assert said(there_and_back, shapes(w=(D, 6)), X) == {"w": "head"}


def test_one_input_may_be_first_or_last():
    def loss(p, x):
        hidden = jnp.tanh(x @ p["last"].T + x @ p["first"])
        return jnp.sum(jnp.tanh(hidden @ p["square"]) @ p["head"])

    shapes = {"first": (1, 8), "last": (8, 1), "square": (8, 8), "head": (8, 3)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    found = mc.read_model(loss, params, jnp.ones((2, 1))).dimension_numbers
    assert found["first"] == MuonDimensionNumbers(0, 1)
    assert found["last"] == MuonDimensionNumbers(1, 0)


def test_matrices_that_indices_pick_are_no_rows_of_a_table():
    def loss(p, x, ids):
        hidden = jnp.einsum("bd,bde->be", x @ p["in"], p["matrices"][ids])
        return jnp.sum(jnp.tanh(hidden + p["table"][ids]) @ p["head"])

    shapes = {"in": (4, 6), "matrices": (5, 6, 7), "table": (5, 7), "head": (7, 3)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    reading = mc.read_model(loss, params, jnp.ones((8, 4)), jnp.zeros(8, int))
    assert reading.dimension_numbers["matrices"] == MuonDimensionNumbers(1, 2)
    assert reading.labels["table"] == "embedding"


def test_what_is_quantized_by_codes_has_no_router():
    def loss(p, codes, x):
        z = jax.nn.relu(x @ p["a"]) @ p["b"]
        distance = (z**2).sum(-1, keepdims=True) - 2 * z @ codes + (codes**2).sum(0)
        quantized = codes.T[jnp.argmin(distance, -1)]
        quantized = z + jax.lax.stop_gradient(quantized - z)
        return cross_entropy(jnp.tanh(quantized @ p["c"]) @ p["out"])

    codes = jax.ShapeDtypeStruct((D, 7), jnp.float32)
    found = said(loss, shapes(a=(D, D), b=(D, D), c=(D, D), out=(D, V)), codes, X)
    assert found == {"a": (0, 1), "b": (0, 1), "c": (0, 1), "out": "head"}


def test_a_recurrent_kernel_is_a_matrix_and_its_initial_state_a_vector():
    def loss(p, x):
        def step(h, x):
            h = jnp.tanh(x @ p["in"] + h @ p["again"])
            return h, h

        start = jnp.broadcast_to(p["start"], (B, D))
        _, out = jax.lax.scan(step, start, x.swapaxes(0, 1))
        return cross_entropy(out @ p["out"])

    params = shapes(**{"in": (D, D)}, again=(D, D), start=(D,), out=(D, V))
    assert said(loss, params, X) == {
        "in": (0, 1),
        "again": (0, 1),
        "start": "vector",
        "out": "head",
    }


def test_convolutions_by_their_kernel():
    def loss(p, x):
        dims = ("NHWC", "HWIO", "NHWC")

        def conv(x, w, groups):
            return jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=dims, feature_group_count=groups
            )

        x = jax.nn.relu(conv(x, p["plain"], 1))
        x = jax.nn.relu(conv(x, p["depthwise"], 8))
        x = jax.nn.relu(conv(x, p["grouped"], 2))
        return cross_entropy(x.mean((1, 2)) @ p["out"])

    params = shapes(
        plain=(3, 3, 3, 8), depthwise=(3, 3, 1, 8), grouped=(3, 3, 4, 6), out=(6, V)
    )
    image = jax.ShapeDtypeStruct((B, 9, 9, 3), jnp.float32)
    assert said(loss, params, image) == {
        "plain": ((0, 1, 2), 3),
        "depthwise": "vector",
        "grouped": ((0, 1, 2), 3),
        "out": "head",
    }


def test_a_kernel_whose_window_is_turned():
    def loss(p, x):
        dims = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_transpose(
            x, p["up"], (2, 2), "SAME", dimension_numbers=dims, transpose_kernel=True
        )
        return cross_entropy(jnp.tanh(x).mean((1, 2)) @ p["out"])

    image = jax.ShapeDtypeStruct((B, 9, 9, 3), jnp.float32)
    found = said(loss, shapes(up=(3, 3, 6, 3), out=(6, V)), image)
    assert found == {"up": ((0, 1, 3), 2), "out": "head"}


def _masked(p, x, tokens):
    rows = jax.nn.one_hot(tokens, V)
    return jnp.where(tokens[..., None] > 1, rows, 0) @ p["table"]


def _weighted(p, x, tokens):
    return jax.nn.one_hot(tokens, V) * (tokens > 1)[..., None] @ p["table"]


@pytest.mark.parametrize("lookup", [_masked, _weighted])
def test_masked_rows_are_a_lookup(lookup):
    def loss(p, x, tokens):
        return cross_entropy(jnp.tanh(lookup(p, x, tokens) @ p["w"]) @ p["out"])

    params = shapes(table=(V, D), w=(D, D), out=(D, V))
    found = said(loss, params, X, TOKENS)
    assert found == {"table": "embedding", "w": (0, 1), "out": "head"}


def test_every_other_output_of_a_kernel():
    def loss(p, x):
        # JAX 0.8 makes a lookup of p["w"][:, i::2], which shows no weight from a table.
        parts = (jax.lax.slice_in_dim(p["w"], i, None, 2, axis=1) for i in range(2))
        gate, up = (x @ part for part in parts)
        return cross_entropy(jax.nn.silu(gate) * up @ p["down"] @ p["out"])

    found = said(loss, shapes(w=(D, 32), down=(16, D), out=(D, V)), X)
    assert found == {"w": (0, 1), "down": (0, 1), "out": "head"}


def test_learned_tokens_that_their_layer_is_added_to():
    """No example has a copy of them when their query is made."""

    def loss(p, x):
        query, key = p["tokens"] @ p["q"], x @ p["k"]
        weights = jax.nn.softmax(jnp.einsum("qd,bkd->bqk", query, key))
        out = p["tokens"] + weights @ (x @ p["v"])
        return cross_entropy(jnp.tanh(out) @ p["out"])

    kernels = dict.fromkeys("qkv", (D, D))
    found = said(loss, shapes(tokens=(3, D), out=(D, V), **kernels), X)
    matrices = dict.fromkeys("qkv", (0, 1))
    assert found == {"tokens": "vector", "out": "head", **matrices}


def test_a_kernel_of_one_output_and_what_is_exponentiated_are_vectors():
    def loss(p, x):
        x = jnp.tanh(x @ p["w"] * jnp.exp(p["scale"]))
        return jnp.mean((x @ p["value"])[..., 0] ** 2)

    params = shapes(w=(D, D), scale=(T, D), value=(D, 1))
    found = said(loss, params, X)
    assert found == {"w": (0, 1), "scale": "vector", "value": "vector"}


def test_a_gain_that_an_einsum_applies_is_no_stack():
    def loss(p, x):
        x = jnp.einsum("btd,dhk->bthk", x, p["w"])
        x = jnp.einsum("i...k,...k->i...k", normed(x), p["gain"])
        return cross_entropy(jnp.einsum("bthk,hkv->btv", jnp.tanh(x), p["out"]))

    found = said(loss, shapes(w=(D, 2, 4), gain=(4,), out=(2, 4, V)), X)
    assert found == {"w": (0, (1, 2)), "gain": "vector", "out": "head"}


@pytest.mark.parametrize("unpack", [tuple, lambda y: (y[0], y[1])])
def test_outputs_that_are_cut_apart_at_once_are_of_a_stack(unpack):
    def loss(p, x):
        gate, up = unpack(jnp.einsum("btd,cdf->cbtf", x, p["up"]))
        return cross_entropy(jnp.tanh(jax.nn.gelu(gate) * up @ p["down"]) @ p["out"])

    found = said(loss, shapes(up=(2, D, 30), down=(30, D), out=(D, V)), X)
    assert found["up"] == (1, 2) and found["down"] == (0, 1)


def test_an_expected_embedding_has_classes_for_inputs():
    def loss(p, x):
        x = jax.nn.softmax(x @ p["classes"]) @ p["embed"]
        return cross_entropy(jnp.tanh(x) @ p["out"])

    found = said(loss, shapes(classes=(D, 6), embed=(6, D), out=(D, V)), X)
    assert found["embed"] == (0, 1)


def test_what_the_function_does_not_use_is_named():
    def loss(p, x):
        hidden = jax.pure_callback(lambda w: w, p["hidden"], p["hidden"])
        return jnp.mean((x @ p["w"]) ** 2) + hidden.sum()

    reading = mc.read_model(loss, shapes(w=(D, D), hidden=(D, D), unused=(D, D)), X)
    assert reading.unknown == ("hidden", "unused")
    table = str(reading)
    assert (
        "not used" in table and "unknown: pure_callback  test_read_model.py:" in table
    )


@pytest.mark.parametrize("wrap", ["jit", "custom_jvp", "custom_vjp", "vmap", "while"])
def test_inside_every_kind_of_call(wrap):
    def body(w, x):
        return jnp.tanh(x @ w)

    def custom(w, x):
        f = getattr(jax, wrap)(body)
        rules = {"custom_jvp": ("defjvp",), "custom_vjp": ("defvjp",)}
        if wrap == "custom_vjp":
            f.defvjp(lambda w, x: (body(w, x), (w, x)), lambda r, g: (r[0], r[1]))
        else:
            f.defjvp(lambda p, t: (body(*p), body(*p)))
        return f(w, x) if rules else None

    ways = {
        "jit": jax.jit(body),
        "vmap": lambda w, x: jax.vmap(body, (None, 0))(w, x),
        "while": lambda w, x: jax.lax.while_loop(
            lambda y: y.sum() < 9, lambda y: body(w, y), x
        ),
    }

    def loss(p, x):
        x = ways.get(wrap, custom)(p["w"], x)
        return cross_entropy(x @ p["out"])

    found = said(loss, shapes(w=(D, D), out=(D, V)), X)
    assert found == {"w": (0, 1), "out": "head"}


def test_inside_shard_map_axes_are_those_of_the_whole():
    auto = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=auto)

    def loss(p, x):
        body = jax.shard_map(
            lambda w, x: jax.lax.psum(x @ w, "model"),
            mesh=mesh,
            in_specs=(P("model", None), P("data", None, "model")),
            out_specs=P("data"),
        )
        return cross_entropy(jnp.tanh(body(p["w"], x)) @ p["out"])

    found = said(loss, shapes(w=(D, D), out=(D, V)), X)
    assert found == {"w": (0, 1), "out": "head"}


def test_linen_with_state():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(16)(x))
            return nn.Dense(V)(nn.Dropout(0.5, deterministic=False)(x))

    net = Net()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.eval_shape(net.init, keys, X)

    def loss(params, state, x, key):
        variables = {"params": params, **state}
        out, _ = net.apply(variables, x, mutable=["batch_stats"], rngs={"dropout": key})
        return cross_entropy(out)

    state = {"batch_stats": variables["batch_stats"]}
    reading = mc.read_model(loss, variables["params"], state, X, jax.random.key(0))
    assert reading.labels["Dense_0"] == {"kernel": "matrix", "bias": "vector"}
    assert reading.labels["Dense_1"]["kernel"] == "head"
    assert not reading.unknown


def test_modules_of_nnx_and_equinox_are_taken_as_they_are():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(D, D, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)
            self.outer = nnx.Linear(D, V, rngs=rngs)

        def __call__(self, x):
            return self.outer(self.drop(jax.nn.relu(self.inner(x))))

    net = Net(nnx.Rngs(0))
    reading = mc.read_model(lambda net, x: cross_entropy(net(x)), net, X)
    labels = nnx.to_pure_dict(reading.labels)
    assert labels["inner"] == {"kernel": "matrix", "bias": "vector"}
    assert labels["outer"] == {"kernel": "head", "bias": "vector"}

    mlp = eqx.nn.MLP(D, V, D, depth=1, key=jax.random.key(0))

    def loss(mlp, x):
        return cross_entropy(jax.vmap(jax.vmap(mlp))(x))

    reading = mc.read_model(loss, mlp, X)
    assert reading.labels.layers[0].weight == "matrix"
    assert tuple(reading.dimension_numbers.layers[0].weight) == (1, 0)
    assert reading.labels.layers[1].weight == "head"


def test_haiku_and_arguments_that_are_no_arrays():
    def forward(x, is_training):
        x = hk.Linear(D, name="inner")(x)
        return hk.Linear(V)(jax.nn.relu(x) if is_training else x)

    net = hk.transform(forward)
    params = jax.eval_shape(lambda k, x: net.init(k, x, True), jax.random.key(0), X)

    def loss(params, key, x, *, is_training):
        return cross_entropy(net.apply(params, key, x, is_training))

    reading = mc.read_model(loss, params, jax.random.key(0), X, is_training=True)
    assert reading.labels["inner"] == {"w": "matrix", "b": "vector"}
    assert reading.labels["linear"]["w"] == "head"


def test_nothing_runs():
    def loss(p, x):
        assert not isinstance(x, np.ndarray)
        return cross_entropy(x @ p["w"])

    huge = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)
    x = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)
    assert mc.read_model(loss, {"w": huge}, x).labels == {"w": "head"}


def test_the_table():
    def loss(p, x):
        return cross_entropy(jax.nn.relu(x @ p["w"]) @ p["out"])

    table = str(mc.read_model(loss, shapes(w=(D, D), out=(D, V)), X)).splitlines()
    at = f"test_read_model.py:{loss.__code__.co_firstlineno + 1}"
    # By its name alone, the leaf that writes the output is any matrix.
    names = "0 > 1 (inputs, outputs)"
    first = "path  shape    label   inputs > outputs  use                line"
    assert table == [
        f"{first.ljust(len(first) - len('line') + len(at))}  names say",
        f"out   (8, 11)  head    -                 writes the output  {at}  {names}",
        f"w     (8, 8)   matrix  0 > 1             contracted         {at}",
        "",
        "label   parameters  share  leaves",
        "head    88          58 %   1",
        "matrix  64          42 %   1",
        "all     152         100 %  2",
        "",
        "no attention was found",
    ]


def _layers(p, x):
    for i in range(3):
        layer = p["blocks"][i]
        logits = jnp.einsum("bqd,bkd->bqk", x @ layer["q"], x @ layer["k"])
        x = x + jax.nn.softmax(logits) @ (x @ layer["v"])
    return cross_entropy(x @ p["out"])


def _params_of_layers():
    blocks = [shapes(**dict.fromkeys("qkv", (D, D))) for _ in range(3)]
    return {"blocks": blocks, **shapes(out=(D, V), unused=(D,))}


def test_repeated_layers_share_a_row_of_the_table():
    reading = mc.read_model(_layers, _params_of_layers(), X)
    leaves, attention, totals = (x.splitlines() for x in str(reading).split("\n\n"))
    paths = ["blocks/0-2/k", "blocks/0-2/q", "blocks/0-2/v", "out", "unused"]
    assert [line.split()[0] for line in leaves[1:]] == paths
    assert [line.split()[:2] for line in attention[1:]] == [["blocks/0-2", "1"]]
    every, layers, same = reading.table(collapse=False).split("\n\n")
    assert len(every.splitlines()) == 1 + 11 and len(layers.splitlines()) == 1 + 3
    assert same.splitlines() == totals
    with pytest.raises(ValueError, match="collapse must be True or False"):
        reading.table(collapse="no")


def test_the_table_ends_with_the_parameters_of_each_label():
    params = _params_of_layers()
    reading = mc.read_model(_layers, params, X)
    *_, totals = str(reading).split("\n\n")
    found = {line.split()[0]: line.split()[1:] for line in totals.splitlines()[1:]}
    sizes = {}
    for label, leaf in zip(
        jax.tree.leaves(reading.labels), jax.tree.leaves(params), strict=True
    ):
        # What no call uses is a guess.
        label += "?" if leaf is params["unused"] else ""
        sizes.setdefault(label, []).append(leaf.size)
    sizes["all"] = [leaf.size for leaf in jax.tree.leaves(params)]
    assert found.keys() == sizes.keys() == {"head", "matrix", "vector?", "all"}
    for label, (parameters, share, _, leaves) in found.items():
        assert int(parameters) == sum(sizes[label])
        assert int(leaves) == len(sizes[label])
        assert float(share) == round(100 * sum(sizes[label]) / sum(sizes["all"]))


def test_a_notebook_shows_the_table_as_html():
    reading = mc.read_model(_layers, _params_of_layers(), X)
    html, text = reading._repr_html_(), str(reading)
    assert html.count("<tr>") == 1 + 5 and html.count("<th>") == 7
    assert "<td>0 &gt; 1</td>" in html and "0 > 1" not in html
    assert text.split("\n\n")[-1] in html  # the totals


def test_the_table_says_what_names_would():
    def loss(p, x):
        x = jnp.tanh(jnp.einsum("btd,dhk->bthk", x, p["a"]))
        return cross_entropy(jnp.einsum("bthk,hkd->btd", x, p["head"]))

    params = shapes(a=(D, 2, 4), head=(2, 4, D))
    first, *rows = str(mc.read_model(loss, params, X)).splitlines()
    assert first.endswith("names say") and rows[0].endswith("nothing")


def test_a_lookup_in_stock_flax_has_the_line_of_the_model():
    net = nn.Embed(V, D)
    params = {"params": shapes(embedding=(V, D))}  # nothing was traced before

    def loss(params, tokens):
        return cross_entropy(net.apply(params, tokens))

    row = str(mc.read_model(loss, params, TOKENS)).splitlines()[1]
    line = loss.__code__.co_firstlineno + 1
    assert f"looked up  test_read_model.py:{line}" in row
