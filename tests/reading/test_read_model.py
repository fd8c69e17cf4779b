"""What a reading says of every parameter, for small models written out here."""

import operator

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numbers import Case, label_faults, shapes
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from written_out import cross_entropy, normed

import muonclip_jax as mc


B, T, D, V = 2, 5, 8, 11
TOKENS = jax.ShapeDtypeStruct((B, T), jnp.int32)
X = jax.ShapeDtypeStruct((B, T, D), jnp.float32)


def image(*shape):
    return jax.ShapeDtypeStruct((B, *shape), jnp.float32)


CASES: dict[str, Case] = {}


def reads(labels, *args, **leaves):
    """Registers a function with the labels that an expert gives its leaves."""

    def register(fun):
        name = fun.__name__.replace("_", " ")
        CASES[name] = Case(name, fun, shapes(**leaves), args or (X,), labels, "none")
        return fun

    return register


@reads("a b 0|1", a=(D, D), b=(D, D))
def hidden_states_are_no_output_of_a_head(p, x):
    for name in ("a", "b"):
        x = x + jax.nn.relu(normed(x) @ p[name])
    return x


@reads("a b 0|1", a=(D, D), b=(D, D))
def hidden_states_in_a_loss_are_no_output_of_a_head(p, x):
    return jnp.mean(hidden_states_are_no_output_of_a_head(p, x) ** 2)


@reads("w head", w=(D, 6))
def the_weight_of_an_autoencoder_writes_the_output_too(p, x):
    return jax.nn.relu(jax.nn.relu(x @ p["w"]) @ p["w"].T)


@reads("w 0|1; o head", w=(D, 6), o=(D, 4))
def a_weight_that_is_applied_both_ways_has_the_inputs_of_its_first_use(p, x):
    return jnp.sum(the_weight_of_an_autoencoder_writes_the_output_too(p, x) @ p["o"])


ONE = jax.ShapeDtypeStruct((2, 1), jnp.float32)


@reads(
    "first square 0|1; last 1|0; head head",
    ONE,
    first=(1, 8),
    last=(8, 1),
    square=(8, 8),
    head=(8, 3),
)
def one_input_may_be_first_or_last(p, x):
    hidden = jnp.tanh(x @ p["last"].T + x @ p["first"])
    return jnp.sum(jnp.tanh(hidden @ p["square"]) @ p["head"])


@reads(
    "into 0|1; matrices 1|2; table embedding; head head",
    jax.ShapeDtypeStruct((8, 4), jnp.float32),
    jax.ShapeDtypeStruct((8,), jnp.int32),
    into=(4, 6),
    matrices=(5, 6, 7),
    table=(5, 7),
    head=(7, 3),
)
def matrices_that_indices_pick_are_no_rows_of_a_table(p, x, ids):
    hidden = jnp.einsum("bd,bde->be", x @ p["into"], p["matrices"][ids])
    return jnp.sum(jnp.tanh(hidden + p["table"][ids]) @ p["head"])


@reads(
    "a b c 0|1; out head",
    jax.ShapeDtypeStruct((D, 7), jnp.float32),
    X,
    **dict.fromkeys("abc", (D, D)),
    out=(D, V),
)
def what_is_quantized_by_codes_has_no_router(p, codes, x):
    z = jax.nn.relu(x @ p["a"]) @ p["b"]
    distance = (z**2).sum(-1, keepdims=True) - 2 * z @ codes + (codes**2).sum(0)
    quantized = codes.T[jnp.argmin(distance, -1)]
    quantized = z + jax.lax.stop_gradient(quantized - z)
    return cross_entropy(jnp.tanh(quantized @ p["c"]) @ p["out"])


@reads(
    "into again 0|1; start vector; out head",
    **dict.fromkeys(("into", "again"), (D, D)),
    start=(D,),
    out=(D, V),
)
def a_recurrent_kernel_is_a_matrix_and_its_initial_state_a_vector(p, x):
    def step(h, x):
        h = jnp.tanh(x @ p["into"] + h @ p["again"])
        return h, h

    start = jnp.broadcast_to(p["start"], (B, D))
    return cross_entropy(jax.lax.scan(step, start, x.swapaxes(0, 1))[1] @ p["out"])


DIMS = ("NHWC", "HWIO", "NHWC")


@reads(
    "plain grouped 012|3; depthwise vector; out head",
    image(9, 9, 3),
    plain=(3, 3, 3, 8),
    depthwise=(3, 3, 1, 8),
    grouped=(3, 3, 4, 6),
    out=(6, V),
)
def convolutions_by_their_kernel(p, x):
    for name, groups in (("plain", 1), ("depthwise", 8), ("grouped", 2)):
        x = jax.lax.conv_general_dilated(
            x,
            p[name],
            (1, 1),
            "SAME",
            dimension_numbers=DIMS,
            feature_group_count=groups,
        )
        x = jax.nn.relu(x)
    return cross_entropy(x.mean((1, 2)) @ p["out"])


@reads("up 013|2; out head", image(9, 9, 3), up=(3, 3, 6, 3), out=(6, V))
def a_kernel_whose_window_is_turned(p, x):
    x = jax.lax.conv_transpose(
        x, p["up"], (2, 2), "SAME", dimension_numbers=DIMS, transpose_kernel=True
    )
    return cross_entropy(jnp.tanh(x).mean((1, 2)) @ p["out"])


LOOKED_UP = {"table": (V, D), "w": (D, D), "out": (D, V)}
looked_up = reads("table embedding; w 0|1; out head", TOKENS, **LOOKED_UP)


@looked_up
def masked_rows_are_a_lookup(p, tokens):
    rows = jnp.where(tokens[..., None] > 1, jax.nn.one_hot(tokens, V), 0)
    return cross_entropy(jnp.tanh(rows @ p["table"] @ p["w"]) @ p["out"])


@looked_up
def weighted_rows_are_a_lookup(p, tokens):
    rows = jax.nn.one_hot(tokens, V) * (tokens > 1)[..., None]
    return cross_entropy(jnp.tanh(rows @ p["table"] @ p["w"]) @ p["out"])


@reads("w down 0|1; out head", w=(D, 32), down=(16, D), out=(D, V))
def every_other_output_of_a_kernel(p, x):
    # JAX 0.8 makes a lookup of p["w"][:, i::2], which shows no weight from a table.
    parts = (jax.lax.slice_in_dim(p["w"], i, None, 2, axis=1) for i in range(2))
    gate, up = (x @ part for part in parts)
    return cross_entropy(jax.nn.silu(gate) * up @ p["down"] @ p["out"])


@reads(
    "tokens vector; q k v 0|1; out head",
    tokens=(3, D),
    **dict.fromkeys("qkv", (D, D)),
    out=(D, V),
)
def learned_tokens_that_their_layer_is_added_to(p, x):
    """No example has a copy of them when their query is made."""
    query, key = p["tokens"] @ p["q"], x @ p["k"]
    weights = jax.nn.softmax(jnp.einsum("qd,bkd->bqk", query, key))
    return cross_entropy(jnp.tanh(p["tokens"] + weights @ (x @ p["v"])) @ p["out"])


@reads("w 0|1; scale value vector", w=(D, D), scale=(T, D), value=(D, 1))
def a_kernel_of_one_output_and_what_is_exponentiated_are_vectors(p, x):
    x = jnp.tanh(x @ p["w"] * jnp.exp(p["scale"]))
    return jnp.mean((x @ p["value"])[..., 0] ** 2)


@reads("w 0|12; gain vector; out head", w=(D, 2, 4), gain=(4,), out=(2, 4, V))
def a_gain_that_an_einsum_applies_is_no_stack(p, x):
    x = jnp.einsum("btd,dhk->bthk", x, p["w"])
    x = jnp.einsum("i...k,...k->i...k", normed(x), p["gain"])
    return cross_entropy(jnp.einsum("bthk,hkv->btv", jnp.tanh(x), p["out"]))


@reads("up 1|2; down 0|1; out head", up=(2, D, 30), down=(30, D), out=(D, V))
def outputs_that_are_cut_apart_at_once_are_of_a_stack(p, x, unpack=tuple):
    gate, up = unpack(jnp.einsum("btd,cdf->cbtf", x, p["up"]))
    return cross_entropy(jnp.tanh(jax.nn.gelu(gate) * up @ p["down"]) @ p["out"])


@reads("up 1|2; down 0|1; out head", up=(2, D, 30), down=(30, D), out=(D, V))
def outputs_that_are_cut_apart_one_by_one_are_of_a_stack(p, x):
    one_by_one = operator.itemgetter(0, 1)
    return outputs_that_are_cut_apart_at_once_are_of_a_stack(p, x, one_by_one)


@reads("classes embed 0|1; out head", classes=(D, 6), embed=(6, D), out=(D, V))
def an_expected_embedding_has_classes_for_inputs(p, x):
    x = jax.nn.softmax(x @ p["classes"]) @ p["embed"]
    return cross_entropy(jnp.tanh(x) @ p["out"])


@reads("w 0|1; out head", w=(D, D), out=(D, V))
def inside_shard_map_axes_are_those_of_the_whole(p, x):
    auto = (AxisType.Auto, AxisType.Auto)
    body = jax.shard_map(
        lambda w, x: jax.lax.psum(x @ w, "model"),
        mesh=jax.make_mesh((1, 1), ("data", "model"), axis_types=auto),
        in_specs=(P("model", None), P("data", None, "model")),
        out_specs=P("data"),
    )
    return cross_entropy(jnp.tanh(body(p["w"], x)) @ p["out"])


def product(w, x):
    return jnp.tanh(x @ w)


def with_rule_of_jvp(w, x):
    fun = jax.custom_jvp(product)
    fun.defjvp(lambda p, t: (product(*p), product(*p)))
    return fun(w, x)


def with_rule_of_vjp(w, x):
    fun = jax.custom_vjp(product)
    fun.defvjp(lambda w, x: (product(w, x), (w, x)), lambda r, g: r)
    return fun(w, x)


CALLS = {
    "jit": jax.jit(product),
    "custom_jvp": with_rule_of_jvp,
    "custom_vjp": with_rule_of_vjp,
    "vmap": jax.vmap(product, (None, 0)),
    "while": lambda w, x: jax.lax.while_loop(
        lambda y: y.sum() < 9, lambda y: product(w, y), x
    ),
}


def inside(call):
    def fun(p, x):
        return cross_entropy(CALLS[call](p["w"], x) @ p["out"])

    fun.__name__ = f"inside {call}"
    return reads("w 0|1; out head", w=(D, D), out=(D, V))(fun)


for name in CALLS:
    inside(name)


@pytest.mark.parametrize("name", CASES)
def test_an_expert_says_the_same(name):
    case = CASES[name]
    reading = mc.read_model(case.fun, case.params, *case.args)
    assert not reading.unknown and label_faults(case, reading) == []


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
