"""The table that shows what happens to each leaf."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import inputs, nnx_model, normal, ScannedModel
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layers import flat_layer
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("every_container")
RECORD = pathlib.Path(__file__).parent / "data" / "exchanges.json"


def rows(text):
    return {line.split("  ")[0]: line for line in text.splitlines()}


def test_scanned_layers():
    params = jax.eval_shape(ScannedModel().init, jax.random.key(0), inputs())
    table = rows(mc.describe(params))
    query = table["layers/attention/query/kernel"]
    assert "(3, 16, 4, 4)" in query and "12 x 16 x 4" in query and "muon" in query
    assert query.endswith("query, 4 heads")
    bias = table["layers/attention/key/bias"]
    assert "adamw" in bias and bias.endswith("key, 4 heads")
    assert table["layers/attention/out/kernel"].endswith("-")


def test_grouped_queries_in_nnx():
    state = nnx.state(nnx_model(kv_heads=2), nnx.Param)
    table = rows(mc.describe(state, collapse=False))
    assert table["layers/1/key/kernel"].endswith("key, 2 heads, stays")
    assert table["layers/1/query/kernel"].endswith("query, 4 heads")


def test_columns_line_up_and_no_line_ends_in_space():
    params = {"a": jnp.ones((2, 2)), "longer": {"bias": jnp.ones(3)}}
    lines = mc.describe(params).splitlines()
    words = ("optimizer", "muon", "adamw")
    columns = {line.index(w) for line, w in zip(lines[:3], words, strict=True)}
    assert len(columns) == 1
    assert all(line == line.rstrip() for line in lines)


def test_stacks_are_those_of_the_plan():
    params = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 4)), "bias": jnp.ones(4)}
    *_, heading, stack = mc.describe(params, stacks=True).splitlines()
    assert heading == "orthogonalized together:"
    assert stack == "2 x 4 x 8 float32 from 2 leaves"
    assert mc.describe({"bias": jnp.ones(4)}, stacks=True).endswith("nothing")
    assert "together" not in mc.describe(params)


def test_shows_a_matrix_for_each_head():
    kernel = jnp.ones((32, 4, 8))
    params = {"attn": {name: {"kernel": kernel} for name in ("query", "key", "value")}}
    table = rows(mc.describe(params, per_head=True))
    assert all("4 x 32 x 8" in table[f"attn/{name}/kernel"] for name in params["attn"])
    whole = rows(mc.describe(params, per_head=False))
    assert "1 x 32 x 32" in whole["attn/query/kernel"]
    by_names = mc.flax_attention_layers
    table = rows(mc.describe(params, per_head=True, attention=by_names))
    assert "4 x 32 x 8" in table["attn/key/kernel"]
    flat = {name: {"kernel": jnp.ones((32, 32))} for name in ("q_proj", "k_proj")}
    table = mc.describe(flat, per_head=True, attention=[flat_layer("", 8)])
    assert table.count("4 x 32 x 8") == 2


def test_shows_what_is_given():
    attn = {"wq": jnp.ones((8, 2, 4)), "wk": jnp.ones((8, 2, 4))}
    layer = mc.AttentionLayer("attn", (mc.HeadLeaf("wq", 3),), (mc.HeadLeaf("wk", 3),))
    text = mc.describe(
        {"wi": jnp.ones((4, 8, 16)), "attn": attn},
        dimension_numbers={"wi": MuonDimensionNumbers(1, 2), "attn": None},
        attention=[layer],
    )
    table = rows(text)
    assert "4 x 8 x 16" in table["wi"] and table["attn/wk"].endswith("key, 2 heads")


def test_normalized_attention_is_shown_with_what_qk_clip_says():
    kernel = jnp.ones((16, 2, 8))
    attn = {"query": {"kernel": kernel}, "key": {"kernel": kernel}}
    params = {"attn": attn | {"query_ln": {"scale": jnp.ones(8)}}}
    text = mc.describe(params)
    assert "2 x 16 x 8" in rows(text)["attn/query/kernel"]
    assert "QK-Clip cannot act on 'attn'" in text.splitlines()[-1]
    with pytest.raises(ValueError, match="cannot act"):
        mc.describe(params, attention=mc.flax_attention_layers)


def test_hidden_leaves_are_shown_as_such():
    assert "masked" in mc.describe({"a": jnp.ones((2, 2)), "b": optax.MaskedNode()})


def test_a_leaf_that_the_reading_does_not_know_is_as_its_name_says():
    def loss(params, x):
        return jnp.sum(x @ jnp.linalg.inv(params["up"]["kernel"]) @ params["down"])

    params = {"up": {"kernel": jnp.eye(4)}, "down": jnp.ones((4, 3))}
    reading = mc.read_model(loss, params, jnp.ones((2, 4)))
    table = rows(mc.describe(params, model=reading))
    assert "not traced: inputs, outputs" in table["up/kernel"]
    assert "muon" in table["up/kernel"] and "not traced" not in table["down"]


def repeated_layers():
    dense, experts = {"kernel": jnp.ones((4, 8))}, {}
    for i in range(12):
        experts[f"layer_{i}"] = {"experts": [jnp.ones((4, 8)), jnp.ones((4, 8))]}
    # One layer with another shape between layers that are alike.
    odd = {"kernel": jnp.ones((4, 16))}
    # Four that differ in a digit after a word are layers, two are not.
    words = {x: dense for x in ("h0", "h1", "h2", "h3", "w1", "w2")}
    return {"blocks": [dense, dense, odd, dense]} | words | experts


def test_layers_that_differ_in_their_index_alone_share_a_row():
    table = mc.describe(repeated_layers())
    paths = [line.split("  ")[0] for line in table.split("\n\n")[0].splitlines()[1:]]
    assert paths == [
        "blocks/0-1/kernel",
        "blocks/3/kernel",
        "blocks/2/kernel",
        "h0-3/kernel",
        "layer_0-11/experts/0-1",
        "w1/kernel",
        "w2/kernel",
    ]
    leaves = len(jax.tree.leaves(repeated_layers()))
    every = mc.describe(repeated_layers(), collapse=False)
    assert len(every.split("\n\n")[0].splitlines()) == leaves + 1


def test_totals_are_those_of_the_state():
    params = repeated_layers() | {"norm": {"scale": jnp.ones(16, jnp.bfloat16)}}
    state = mc.muon(1e-2).init(params)
    for line, name in zip(
        mc.describe(params).splitlines()[-3:], ("muon", "adamw", "both"), strict=True
    ):
        inner = state.inner_states.get(name, state)
        arrays = [x for x in jax.tree.leaves(inner) if x.ndim]
        bytes_ = sum(x.size * x.dtype.itemsize for x in arrays)
        assert line.startswith(name)
        number, unit = line.split()[-2:]
        assert float(number) * {"B": 1, "kB": 1000}[unit] == pytest.approx(
            bytes_, rel=0.03
        )
        if name == "both":
            assert f"{sum(x.size for x in jax.tree.leaves(params)):,}" in line


def test_a_notebook_shows_html():
    params = {"a<b": jnp.ones((2, 2)), "bias": jnp.ones(3)}
    table = mc.describe(params)
    html = table._repr_html_()
    assert isinstance(table, str) and "a&lt;b" in html and "a<b" not in html
    assert html.count("<tr>") == 3 and html.count("<th>") == html.count("</th>") == 6
    assert "optimizer  parameters" in html


@pytest.mark.parametrize(
    "decay",
    [
        dict(weight_decay=0.25),
        dict(weight_decay=0.25, adam_weight_decay=0.5),
        dict(adam_weight_decay=0.0),
        dict(weight_decay_mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        dict(weight_decay_mask={"attention": True, "norm": False}),
    ],
)
def test_decay_is_what_an_update_without_gradients_takes_off(decay):
    kernel = {"kernel": jnp.ones((8, 2, 4)), "bias": jnp.ones((2, 4))}
    params = {
        "attention": {"query": kernel, "key": kernel},
        "norm": {"scale": jnp.ones(8)},
    }
    tx = mc.muon(1.0, **decay)
    updates, _ = tx.update(optax.tree.zeros_like(params), tx.init(params), params)
    table = mc.describe(params, collapse=False, **decay).split("\n\n")[0]
    head, *lines = (line.split() for line in table.splitlines())
    assert head[3:5] == ["optimizer", "decay"]
    shown = {path: line[line.index(word) + 1] for path, *line in lines
             for word in ("muon", "adamw") if word in line}  # fmt: skip
    for path, update in jax.tree.leaves_with_path(updates):
        rate = shown["/".join(key.key for key in path)]
        rate = 0.0 if rate == "-" else float(rate)
        assert float(-update.ravel()[0]) == pytest.approx(rate)


def test_decay_is_shown_where_it_is_asked_for():
    params = {"w": jnp.ones((2, 3)), "gone": optax.MaskedNode()}
    assert "decay" not in mc.describe(params)
    table = mc.describe(params, weight_decay=optax.constant_schedule(0.1))
    assert rows(table)["w"].split("  ")[-3].strip() == "schedule"
    assert "schedule" not in rows(table)["gone"]
    with pytest.raises(ValueError, match="weight_decay_mask has no entry for 'w'"):
        mc.describe(params, weight_decay_mask={})
    with pytest.raises(ValueError, match="weight_decay must be a number"):
        mc.describe(params, weight_decay="0.1")


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def attend(p, x, prepare=unit):
    """The parameters scale its logits only where nothing divides by a norm."""
    query, key = (prepare(x @ p[name]) for name in "qk")
    return jax.nn.softmax(query @ key.mT) @ (x @ p["v"])


def as_it_is(x):
    return x


def normalized(p, x):
    """Two layers whose logits no parameter scales, and one like any other."""
    for layer in (p["first"], p["second"], p["last"]):
        x = x + attend(layer, x, as_it_is if layer is p["last"] else unit)
    return jnp.mean((x @ p["out"]) ** 2)


def of_normalized():
    layer = {name: normal(i, 8, 8) for i, name in enumerate("qkv")}
    params = {"first": layer, "second": layer, "last": layer, "out": normal(3, 8, 4)}
    return params, mc.read_model(normalized, params, normal(4, 2, 5, 8))


def test_refused_layers_are_below_the_table_with_their_reason():
    params, reading = of_normalized()
    table, _, below = mc.describe(params, model=reading).split("\n\n")
    # QK-Clip's error lists the same.
    with pytest.raises(ValueError) as error:
        mc.qk_clip(model=reading)
    heading, *lines = below.splitlines()
    assert len(lines) == 2 == len(reading.refused) and heading in str(error.value)
    for line, path in zip(lines, ("first", "second"), strict=True):
        at = f"{path} at test_describe.py:{normalized.__code__.co_firstlineno}"
        assert line.startswith(at[: at.index(":")]) and "norm without a gain" in line
        assert line in str(error.value)
    assert rows(table)["last/q"].endswith("query, all heads")
    assert rows(table)["first/q"].endswith("-")
    # The rows are those of `muon`, which the refusal does not concern.
    state = mc.muon(1e-3, model=reading).init(params)
    assert "muon" in state.inner_states and "muon" in rows(table)["first/q"]
    # The other layers alone, as the error says: nothing is left to refuse, and a
    # logger has no say in it.
    tx = mc.qk_clip(model=reading, attention=reading.attention)
    numbers = mc.scalars(tx.init(params), params, model=reading, heads=True)
    assert numbers["gamma/last/head_0"] == 1.0
    alone = mc.describe(params, model=reading, attention=reading.attention)
    assert "cannot scale" not in alone and rows(alone)["last/q"].endswith("heads")


def test_a_part_of_the_params_is_shown_with_what_a_clip_of_it_would_say():
    """As with `wrt=nnx.LoRAParam`: `mc.muon` updates it, and a clip lacks the rest."""
    params = {name: normal(i, 8, 8) for i, name in enumerate("qkvo")}

    def loss(p, x):
        return jnp.sum(attend(p, x, as_it_is) @ p["o"])

    reading, part = mc.read_model(loss, params, normal(4, 5, 8)), {"q": params["q"]}
    table, *_, below = mc.describe(part, model=reading).split("\n\n")
    assert rows(table)["q"].split()[-3:] == ["muon", "traced", "-"]
    with pytest.raises(ValueError, match="not given 'k', but") as error:
        mc.qk_clip(model=reading).init(part)
    assert below == str(error.value)


def test_the_error_advises_the_other_layers_only_if_there_are_some():
    _, some = of_normalized()
    params = {name: normal(i, 8, 8) for i, name in enumerate("qkv")}

    def loss(params, x):
        return jnp.sum(attend(params, x))

    none = mc.read_model(loss, params, normal(4, 5, 8))
    message = "To clip only the other layers, .*, or use mc"
    with pytest.raises(ValueError, match=message):
        mc.qk_clip(model=some)
    with pytest.raises(ValueError, match=r"Give attention=\[\] to clip nothing, or"):
        mc.qk_clip(model=none)
    assert not mc.qk_clip(model=none, attention=[]).init(params).gamma.size


def test_a_reading_ends_with_what_describe_says_of_its_attention():
    params, reading = of_normalized()
    described, printed = (
        str(x).split("\n\n") for x in (mc.describe(params, model=reading), reading)
    )
    assert described[-1] == printed[-1] and "nothing:" not in str(reading)
    _, attention, *_ = printed
    assert [line.split()[0] for line in attention.splitlines()] == ["attention", "last"]


def test_repeated_layers_that_are_refused_share_a_line():
    layer = {name: normal(i, 8, 8) for i, name in enumerate("qkv")}
    params = {"blocks": [layer] * 3, "out": normal(3, 8, 4)}

    def loss(p, x):
        for layer in p["blocks"]:
            x = x + attend(layer, x)
        return jnp.mean((x @ p["out"]) ** 2)

    reading = mc.read_model(loss, params, normal(4, 2, 5, 8))
    for show in (reading.table, functools.partial(mc.describe, params, model=reading)):
        together, apart = (show(collapse=x).split("\n\n")[-1] for x in (True, False))
        assert together.splitlines()[1].startswith("blocks/0-2 at ")
        assert len(together.splitlines()) == 2 and len(apart.splitlines()) == 4


def test_a_model_without_attention_is_said_to_have_none():
    params = {"up": normal(0, 8, 16), "down": normal(1, 16, 8)}

    def loss(p, x):
        return jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)

    reading = mc.read_model(loss, params, normal(2, 3, 8))
    for table in (mc.describe(params, model=reading), str(reading)):
        assert table.splitlines()[-1] == "no attention was found"
    _, with_attention = of_normalized()
    assert "no attention was found" not in str(with_attention)
    # Names alone did not look for all that may be attention.
    assert "no attention" not in mc.describe(params)


def test_params_on_two_meshes_have_a_table():
    params = {}
    for name, axis, devices in (("down", "a", slice(4)), ("up", "b", slice(4, 8))):
        mesh = jax.sharding.Mesh(jax.devices()[devices], axis)
        params[name] = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P(axis)))
    table = mc.describe(params, dimension_numbers={"*": MuonDimensionNumbers(0, 1)})
    assert "along 'a' (4), 'b' (4)" in table


@pytest.mark.parametrize(
    ("kind", "spec", "is_said"),
    [
        (AxisType.Auto, P(None, "data", "model"), True),
        (AxisType.Auto, P("data"), False),  # devices hold whole matrices
        (AxisType.Auto, P(), False),
        (AxisType.Explicit, P(None, "data", "model"), False),  # the types say it
    ],
)
def test_params_on_a_mesh_say_what_shardings_spare(kind, spec, is_said):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    sharding = NamedSharding(mesh, spec)
    params = {"experts": jax.device_put(jnp.ones((4, 8, 16)), sharding)}
    table = mc.describe(params, dimension_numbers={"*": MuonDimensionNumbers(1, 2)})
    along = "the mesh cuts matrices along 'data' (4), 'model' (2)"
    assert (along in table) == ("shardings=" in table) == is_said
    # The most on record.
    most = max(
        sum(of["nothing said"].values()) / sum(of["shardings given"].values())
        for of in json.loads(RECORD.read_text()).values()
    )
    assert (f"up to {most:.1f} times" in table) == is_said
