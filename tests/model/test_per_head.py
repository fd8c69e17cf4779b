"""The description of the heads says which matrices each of them is."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_zoo import GEMMA
from helpers import first_update, inputs, normal, ScannedModel
from layers import latent_layer
from optax.contrib import MuonDimensionNumbers
from pieces import CASES, leaf_of

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("every_container")

STATS = {"max_logits": jnp.ones(4)}
IN = MuonDimensionNumbers(0, (1, 2))


def test_per_head_matrices_from_the_description():
    """Latent and Gemma's kernels, in front and at axis 1 stacked."""
    latent = {
        "layers": {
            "wq_b": {"kernel": jnp.ones((6, 3, 4, 8))},
            "wkv_b": {"kernel": jnp.ones((5, 3, 4, 7))},
            "up": {"kernel": jnp.ones((2, 9))},
        }
    }
    find = [latent_layer("layers", 4, stack_axis=1)]
    table = mc.describe(latent, attention=find, per_head=True)
    # The key of each head, and its value.
    for shape in ("12 x 6 x 8", "12 x 5 x 4 + 12 x 5 x 3", "1 x 2 x 9"):
        assert shape in table
    gemma = {"q_einsum": jnp.ones((4, 16, 8)), "kv_einsum": jnp.ones((2, 4, 16, 8))}
    table = mc.describe(
        gemma,
        attention=[GEMMA],
        dimension_numbers=MuonDimensionNumbers(-2, -1),
        per_head=True,
    )
    assert "4 x 16 x 8" in table and "8 x 16 x 8" in table
    one_key_head = gemma | {"kv_einsum": jnp.ones((2, 1, 16, 8))}
    table = mc.describe(one_key_head, attention=[GEMMA], per_head=True)
    assert "4 x 16 x 8" in table and "2 x 16 x 8" in table


def layer_of(query, key):
    return [mc.AttentionLayer("", (query,), (key,))]


def parts_of(split, at, **how):
    """Query and key of a fused kernel, the first two along one axis of three."""
    return layer_of(
        *(
            mc.HeadLeaf("w", 2, split=split, part=(at, slice(i, i + 1)), **how)
            for i in range(2)
        )
    )


NAME = "fused, value whole"
FUSED = {
    NAME: parts_of((3, 4, 4), -3),
    "heads of query, key and value": parts_of((4, 3, 4), -2, axis=-3),
}


def update_of(params, stats=STATS, **options):
    tx = mc.muonclip(0.1, **options)
    return first_update(tx, params, params, attention_stats=stats)


@pytest.mark.parametrize("name", FUSED)
def test_heads_of_fused_kernels_are_those_cut_by_hand(name):
    params, attention = {"w": leaf_of(CASES[name], 0)}, FUSED[name]
    found = update_of(params, attention=attention, per_head=True)
    by_hand = {"*w": CASES[name].axes}
    expected = update_of(params, attention=attention, dimension_numbers=by_hand)
    np.testing.assert_array_equal(found["w"], expected["w"])


def test_fewer_keys_than_queries_in_one_kernel():
    """Eight heads of the query, then two of the key, then as many of the value."""
    query, key = (
        mc.HeadLeaf("w", 2, split=(12, 4), part=(-2, slice(*ends)))
        for ends in ((0, 8), (8, 10))
    )
    params, attention = {"w": leaf_of(CASES[NAME], 0)}, layer_of(query, key)
    table = mc.describe(params, attention=attention, per_head=True)
    assert "10 x 16 x 4 + 1 x 16 x 8" in table


def test_layers_next_to_a_reading():
    """`attention=` says which layers; what else is a matrix, the reading says."""

    def loss(params, x):
        query, key, value = (x @ params[name] for name in "abv")
        logits = jnp.einsum("qhd,khd->hqk", *(y.reshape(6, 4, 4) for y in (query, key)))
        out = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(logits), value.reshape(6, 4, 4))
        return jnp.sum((out + params["stack"].sum(0)[None, None, :4]) ** 2)

    params = {name: normal(i, 16, 16) for i, name in enumerate("abv")}
    params["stack"] = normal(3, 5, 7)  # added, so AdamW's, though names say a matrix
    reading = mc.read_model(loss, params, normal(4, 6, 16))
    assert reading.labels["stack"] == "vector"
    alone = update_of(params, model=reading, per_head=True)
    options = dict(model=reading, attention=reading.attention)
    both = update_of(params, **options, per_head=True)
    jax.tree.map(np.testing.assert_array_equal, alone, both)
    whole = update_of(params, **options, per_head=False)
    np.testing.assert_array_equal(whole["stack"], both["stack"])
    assert (whole["a"] != both["a"]).any()


@pytest.mark.parametrize("per_head", [None, True, False])
def test_stock_layers_are_cut_alike_with_a_reading_and_without(per_head):
    """The value too, whose heads no logits show."""
    model, x = ScannedModel(), inputs()
    params = model.init(jax.random.key(0), x)["params"]

    def loss(params, x):
        return jnp.mean(model.apply({"params": params}, x) ** 2)

    def update(**options):
        return first_update(mc.muon(0.1, per_head=per_head, **options), grads, params)

    reading, grads = mc.read_model(loss, params, x), jax.grad(loss)(params, x)
    jax.tree.map(np.testing.assert_array_equal, update(), update(model=reading))
    table = mc.describe(params, model=reading, per_head=per_head)
    (value,) = (row for row in table.splitlines() if "value/kernel" in row)
    heads = 1 if per_head is False else 4
    count, fan_in, fan_out = re.search(r"(\d+) x (\d+) x (\d+)", value).groups()
    assert int(count) == 3 * heads and int(fan_out) * heads == int(fan_in)


def test_flat_heads_are_those_of_an_axis():
    flat = {name: leaf_of(CASES["flat heads"], i) for i, name in enumerate("qk")}
    apart = {name: x.reshape(16, 8, 6) for name, x in flat.items()}
    found, stats = [], {"max_logits": jnp.ones(8)}
    for params, how in ((flat, {"ndim": 2, "split": (8, 6)}), (apart, {"ndim": 3})):
        attention = layer_of(*(mc.HeadLeaf(name, **how) for name in "qk"))
        found.append(update_of(params, stats, attention=attention, per_head=True))
    for name in "qk":
        by_axis = found[1][name].reshape(16, 48)
        np.testing.assert_allclose(found[0][name], by_axis, rtol=0, atol=1e-6)


AXES = ["ehd", "hed", "hde", "edh", "dhe", "deh"]


@pytest.mark.parametrize("axes", AXES)
def test_inputs_are_those_of_the_loss_wherever_their_axis_stands(axes):
    """Haliax keeps kernels as `(heads, head_dim, inputs)`."""
    kernels = [normal(i, 16, 2, 4) for i in range(2)]
    x = normal(2, 5, 16)

    def loss(params, x):
        q, k = (jnp.einsum(f"be,{axes}->hbd", x, params[name]) for name in "ab")
        return jnp.sum((jax.nn.softmax(q @ k.mT) @ x) ** 2)

    def moved(x, before, after):
        return jnp.einsum(f"{before}->{after}", x)

    params = {n: moved(x, "ehd", axes) for n, x in zip("ab", kernels, strict=True)}
    # Four where a head is right, a quarter where it is transposed.
    tx = mc.scale_by_muon(
        beta=0.0,
        consistent_rms=lambda inputs, outputs: inputs / outputs,
        model=mc.read_model(loss, params, x),
    )
    found = first_update(tx, params)
    for name, kernel in zip("ab", kernels, strict=True):
        heads = mc.newton_schulz(jnp.moveaxis(kernel, 1, 0))
        expected = jnp.moveaxis(4 * heads, 0, 1)
        # Rounding, magnified by the slope of the steps: 3.4445**5 * 2**-24.
        actual = moved(found[name], axes, "ehd")
        np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-5 * 4)


@pytest.mark.more
def test_heads_in_groups_are_a_matrix_each():
    shapes = {"query": (16, 2, 3, 4), "key": (16, 2, 4)}
    params = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    attention = layer_of(mc.HeadLeaf("query", 4, (-3, -2)), mc.HeadLeaf("key", 3))
    tx = mc.muonclip(
        1.0,
        attention=attention,
        per_head=True,
        dimension_numbers={"query": MuonDimensionNumbers(0, (1, 2, 3)), "key": IN},
        consistent_rms=None,
        beta=0.0,
        weight_decay=0.0,
    )
    stats = {"max_logits": jnp.ones(6)}
    found = first_update(tx, params, params, attention_stats=stats)
    of_heads = mc.newton_schulz(jnp.moveaxis(params["query"], 0, 2))
    np.testing.assert_allclose(found["query"], -jnp.moveaxis(of_heads, 2, 0), atol=1e-5)


def test_heads_that_do_not_follow_one_another_are_refused():
    """Every second output is one head's."""
    query, key = (mc.HeadLeaf(name, 2, axis=-1, split=(4, 2)) for name in "qk")
    params = {name: jnp.ones((6, 8)) for name in "qk"}
    with pytest.raises(ValueError, match="per_head=True cannot cut '[qk]'"):
        mc.muonclip(0.1, attention=layer_of(query, key), per_head=True).init(params)
