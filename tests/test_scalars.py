"""A run in numbers: each against what NumPy says of the same state."""

import json
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal, ROOT
from test_manual import blocks

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

KERNEL = (8, 2, 4)
PARAMS = {
    "embed": {"embedding": normal(0, 32, 8)},
    "layers": {"attn": {"query": {"kernel": normal(1, 3, *KERNEL)}}},
    "up": {"kernel": normal(3, 8, 16), "bias": normal(4, 16)},
}
PARAMS["layers"]["attn"]["key"] = {"kernel": normal(2, 3, *KERNEL)}
STACKED = {"dimension_numbers": {"layers/*": mc.MuonDimensionNumbers(1, (2, 3))}}
ONE_STEP = STACKED | {"orthogonalizer": mc.NewtonSchulz(steps=1)}
LOGITS = np.asarray([[5.0, 400.0], [np.inf, 7.0], [120.0, 2.0]], np.float32)
STATS = {"layers": {"attn": {"max_logits": jnp.asarray(LOGITS)}}}


def one_step(tx):
    grads = jax.tree.map(lambda x: x[..., ::-1], PARAMS)
    return tx.update(grads, tx.init(PARAMS), PARAMS, attention_stats=STATS)


def norm(*leaves):
    return np.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in leaves))


def test_every_number_by_hand():
    tx = optax.inject_hyperparams(mc.muonclip)(
        optax.constant_schedule(0.1),
        beta=0.8,
        orthogonalizer=mc.NewtonSchulz(steps=2),
        **STACKED,
    )
    updates, state = one_step(tx)
    found = mc.scalars(state, PARAMS, updates=updates, **STACKED)
    assert json.loads(json.dumps(found)) == found  # Python's own numbers
    finite = LOGITS[np.isfinite(LOGITS)]
    expected = {
        "max_logit": finite.max(),
        "max_logit/layers/attn": finite.max(),
        "num_clipped": (finite > 100).sum(),
        "num_nonfinite": 1,
        "clipped_fraction": 2 / 6,
        "ever_clipped_fraction": 2 / 6,
        "hyperparams/learning_rate": 0.1,
        "hyperparams/beta": 0.8,
    }
    for kind, tree in (("param_norm", PARAMS), ("update_norm", updates)):
        attn = [tree["layers"]["attn"][name]["kernel"] for name in ("query", "key")]
        expected |= {
            f"{kind}/matrix": norm(*attn, tree["up"]["kernel"]),
            f"{kind}/embedding": norm(tree["embed"]["embedding"]),
            f"{kind}/vector": norm(tree["up"]["bias"]),
        }
    for name, number in expected.items():
        np.testing.assert_allclose(found[name], number, rtol=1e-5, err_msg=name)
    others = found.keys() - expected.keys()
    assert all(name.startswith("hyperparams/") for name in others)


def test_without_attention_and_under_jit():
    tx = mc.muon(0.1, orthogonalizer=mc.NewtonSchulz(steps=2), **STACKED)
    _, state = one_step(tx)
    found = mc.scalars(state, PARAMS, **STACKED)
    assert {name.split("/")[0] for name in found} == {"param_norm"}
    plain = {"up": PARAMS["up"]}
    state_of_none = mc.muonclip(0.1).init(plain)
    assert mc.scalars(state_of_none, plain)["clipped_fraction"] == 0
    traced = jax.jit(lambda s, p: mc.scalars(s, p, **STACKED))(state, PARAMS)
    assert found.keys() == traced.keys()
    for name in found:
        np.testing.assert_allclose(found[name], traced[name], rtol=1e-6)


def test_a_state_of_other_params_is_refused():
    _, state = one_step(mc.muonclip(0.1, **ONE_STEP))
    other = {"attn": {name: {"kernel": jnp.ones(KERNEL)} for name in ("query", "key")}}
    with pytest.raises(ValueError, match="the optimizer state holds 6 heads"):
        mc.scalars(state, other)


def test_the_loggers_of_the_manual_take_the_numbers(monkeypatch):
    """Its blocks for wandb and TensorBoard, with a stand-in for either library."""
    logged = []

    def log(*args, **options):
        (numbers,) = (x for x in args if isinstance(x, dict))
        logged.append(json.loads(json.dumps(numbers)))

    run = types.SimpleNamespace(log=log)
    writer = types.SimpleNamespace(write_scalars=log)
    writers = types.SimpleNamespace(create_default_writer=lambda path: writer)
    stand_ins = {
        "wandb": types.SimpleNamespace(init=lambda **_: run),
        "clu": types.SimpleNamespace(metric_writers=writers),
    }
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    _, state = one_step(mc.muonclip(0.1, **ONE_STEP))
    page = ROOT / "docs" / "logging.md"
    titled = [b for b in blocks(page) if b.kind == "python" and "Needs" in b.title]
    for block in titled:
        code = block.code.replace("model=reading", "**options")
        known = {"mc": mc, "state": state, "params": PARAMS, "loss": 1.5}
        exec(code, known | {"options": STACKED})
    assert len(logged) == len(titled) == 2
    assert logged[0]["loss"] == 1.5
    assert all(x["num_clipped"] == 2 for x in logged)


def hyperparams(tx, **options):
    found = mc.scalars(tx.init(PARAMS), PARAMS, **STACKED, **options)
    names = (name for name in found if name.startswith("hyperparams/"))
    return {name.removeprefix("hyperparams/"): found[name] for name in names}


def test_every_rate_has_a_name_of_its_own():
    """One a group, one inside another, one after the other: none hides another."""
    rate = optax.inject_hyperparams(optax.sgd)
    labels = {name: "rest" for name in PARAMS} | {"up": "up"}
    groups = optax.partition({"up": rate(0.25), "rest": rate(0.5)}, labels)
    rates = {"rest/learning_rate": 0.5, "up/learning_rate": 0.25}
    assert hyperparams(groups) == rates
    # What leads to all of them says nothing.
    assert hyperparams(optax.chain(optax.clip(1.0), groups)) == rates
    alone = hyperparams(optax.chain(optax.clip(1.0), rate(0.5)))
    assert alone == {"learning_rate": 0.5}

    def clipped(learning_rate):
        clip = optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=2.0)
        return optax.chain(clip, rate(4.0), optax.sgd(learning_rate))

    nested = hyperparams(optax.inject_hyperparams(clipped)(learning_rate=8.0))
    own = {"0/max_norm": 2.0, "1/learning_rate": 4.0}
    assert nested == own | {"learning_rate": 8.0}

    def twice(learning_rate):
        return rate(2 * learning_rate)

    # The same keys lead to both, so that fields have to tell them apart.
    both = hyperparams(optax.inject_hyperparams(twice)(learning_rate=1.0))
    assert sorted(both.values()) == [1.0, 2.0]


def test_what_is_not_finite_is_absent_until_it_is():
    tx = optax.inject_hyperparams(mc.muonclip)(0.1, threshold=float("inf"), **STACKED)
    found = mc.scalars(tx.init(PARAMS), PARAMS, **STACKED)
    json.dumps(found, allow_nan=False)
    assert "hyperparams/threshold" not in found and "hyperparams/alpha" in found
    broken = PARAMS | {"embed": {"embedding": jnp.full((32, 8), jnp.nan)}}
    found = mc.scalars((), broken, **STACKED)
    assert {name for name in found} == {"param_norm/matrix", "param_norm/vector"}


@pytest.mark.more
def test_a_reading_names_layers_and_groups():
    params = {"q": normal(0, 8, 8), "k": normal(1, 8, 8), "out": normal(2, 8, 4)}
    x = normal(3, 5, 8)

    def loss(p, x):
        query, key = ((x @ p[name]).reshape(5, 2, 4) for name in "qk")
        weights = jax.nn.softmax(jnp.einsum("ihd,jhd->hij", query, key))
        return jnp.mean((jnp.einsum("hij,jf->if", weights, x) @ p["out"]) ** 2)

    reading = mc.read_model(loss, params, x)
    query, key = (np.reshape(x @ params[name], (5, 2, 4)) for name in "qk")
    logits = np.einsum("ihd,jhd->hij", query, key).max((1, 2))
    grads, stats = jax.grad(mc.record_attention(loss), has_aux=True)(params, x)
    tx = mc.muonclip(0.1, threshold=float(logits.mean()), model=reading)
    _, state = tx.update(grads, tx.init(params), params, attention_stats=stats)
    layers = {"model": reading}, {"attention": reading.attention}
    for options in layers:
        found = mc.scalars(state, params, updates=grads, heads=True, **options)
        (layer,) = (name for name in found if name.endswith("head_0") if "max" in name)
        layer = layer.removesuffix("/head_0").removeprefix("max_logit/")
        for i, logit in enumerate(logits):
            at = f"{layer}/head_{i}"
            np.testing.assert_allclose(found[f"max_logit/{at}"], logit, rtol=1e-5)
            gamma = min(1, logits.mean() / logit)
            np.testing.assert_allclose(found[f"gamma/{at}"], gamma, rtol=1e-5)
    found = mc.scalars(state, params, updates=grads, model=reading)
    np.testing.assert_allclose(found["update_norm/head"], norm(grads["out"]), rtol=1e-5)
    assert "param_norm/matrix" in found


def test_second_clip_and_clip_before_muon_are_named():
    muon, clip = mc.muon(0.0, **STACKED), mc.qk_clip()
    twice = optax.chain(mc.muonclip(0.0, **STACKED), clip)
    updates, state = one_step(twice)
    # 400 to 25, not to 100: the head is scaled by the square of its factor.
    before, moved = (tree["layers"]["attn"] for tree in (PARAMS, updates))
    query, key = (1 + moved[n]["kernel"] / before[n]["kernel"] for n in before)
    factor = (query * key)[0, :, 1]
    np.testing.assert_allclose(factor, (100 / 400) ** 2, rtol=1e-4)
    with pytest.raises(ValueError, match="2 qk_clip states.*scales what another has"):
        mc.scalars(state, PARAMS)

    updates, state = one_step(optax.chain(optax.chain(clip), muon))
    assert not np.any(updates["layers"]["attn"]["query"]["kernel"])
    with pytest.warns(UserWarning, match="qk_clip is before Muon .* nothing is clip"):
        assert mc.scalars(state, PARAMS)["num_clipped"] == 2
    for right in (
        optax.chain(muon, clip),
        optax.partition(
            {"a": clip, "b": mc.muon(0.0)},
            lambda tree: jax.tree.map(lambda _: "b", tree) | {"layers": "a"},
        ),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mc.scalars(right.init(PARAMS), PARAMS)
