"""Every option goes where it is meant to; none is dropped or takes another's place."""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import leaf_pairs, normal, one_at_a_time, query_and_key, randomize, trained
from internals import muon_module, muonclip_module, scale_module
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


LAYER = mc.AttentionLayer("", (mc.HeadLeaf("w", 2),), (mc.HeadLeaf("v", 2),))


class Read(NamedTuple):
    """What a reading of the params below would say."""

    dimension_numbers: Any
    labels: Any
    attention: tuple = (LAYER,)
    unknown: tuple = ()
    refused: tuple = ()


NUMBERS = {"w": MuonDimensionNumbers(1, 0), "v": None, "b": None}
MESH = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
EVERYWHERE = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec())
SPECS = dict.fromkeys(NUMBERS, EVERYWHERE)

READ = Read(NUMBERS, {"w": "matrix", "v": "head", "b": "vector"})

#: For every option of `muonclip` a value that is not its default.
VALUES = {
    "learning_rate": 0.125,
    "threshold": 7.0,
    "alpha": 0.25,
    "attention": [LAYER],
    "model": READ,
    "beta": 0.5,
    "nesterov": False,
    "orthogonalizer": mc.NewtonSchulz("polar_express", method="gram"),
    "consistent_rms": None,
    "weight_decay": 0.3,
    "weight_decay_mask": {"w": False, "v": True, "b": False},
    "mu_dtype": "bfloat16",
    "dimension_numbers": NUMBERS,
    "adam_learning_rate": 0.7,
    "adam_b1": 0.6,
    "adam_b2": 0.8,
    "adam_eps": 1e-2,
    "adam_weight_decay": 0.4,
    "cautious_weight_decay": True,
    "neuron_b2": 0.8,
    "per_head": True,
    "shardings": SPECS,
    "axis_name": "data",
    "slow_axes": "slice",
}
RATE = 0.5


def options_of(function):
    parameters = inspect.signature(function).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def record(monkeypatch, module, name):
    """What `module` calls the function of this name with, its defaults filled in."""
    received, function = {}, getattr(module, name)
    signature = inspect.signature(function)

    def watched(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        received.update(bound.arguments)
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, watched)
    return received


@pytest.mark.parametrize("name", options_of(mc.muonclip))
def test_muonclip_hands_every_option_on(monkeypatch, name):
    muon = record(monkeypatch, muonclip_module, "muon")
    clip = record(monkeypatch, muonclip_module, "qk_clip")
    expected = options_of(mc.muonclip) | {"learning_rate": RATE}
    assert VALUES[name] != expected[name]
    expected[name] = VALUES[name]
    mc.muonclip(**{"learning_rate": RATE, name: VALUES[name]})
    # All that is known of the model is one object, in place of four arguments.
    assert muon["model"] is clip["model"]
    both = muon.keys() & clip.keys()
    assert both == {"axis_name", "shardings", "model"}
    assert all(muon[name] == clip[name] for name in both)
    assert muon | clip | muon["model"]._asdict() == expected


PARAMS = {
    "w": np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32),
    "v": np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32),
    "b": np.linspace(-1, 1, 4, dtype=np.float32),
}


def given_to(monkeypatch, module, make):
    """What `module` makes Muon's direction of, and for which leaves."""
    with monkeypatch.context() as patch:
        direction = record(patch, module, "make_direction")
        leaves = record(patch, module, "for_leaves")
        make()
    names = ("knowledge", "shardings", "axis_name")
    return direction | {name: leaves[name] for name in names}


@pytest.mark.parametrize("name", options_of(mc.scale_by_muon))
def test_muon_and_scale_by_muon_take_the_same_direction(monkeypatch, name):
    default = given_to(monkeypatch, muon_module, lambda: mc.muon(RATE))
    changed = {name: VALUES[name]}
    by_muon = given_to(monkeypatch, muon_module, lambda: mc.muon(RATE, **changed))
    alone = given_to(monkeypatch, scale_module, lambda: mc.scale_by_muon(**changed))
    assert by_muon == alone != default


@pytest.mark.parametrize("name", ["dimension_numbers", "shardings"])
def test_muon_calls_functions_with_all_params(name):
    seen = []
    called = mc.muon(RATE, **{name: lambda p: seen.append(p) or VALUES[name]})
    given = mc.muon(RATE, **{name: VALUES[name]})
    found, expected = called.init(PARAMS), given.init(PARAMS)
    assert seen == [PARAMS]
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in leaf_pairs(found, expected):
        assert x.sharding == y.sharding


#: The options that `muon` sees to itself, in AdamW's names, and `mu_dtype` of both.
ADAMW = {
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "weight_decay_mask": "mask",
    "adam_learning_rate": "learning_rate",
    "adam_b1": "b1",
    "adam_b2": "b2",
    "adam_eps": "eps",
    "adam_weight_decay": "weight_decay",
    "mu_dtype": "mu_dtype",
}
#: Steps of their own, in tests of their own.
STEPS = {"cautious_weight_decay", "neuron_b2", "per_head"}
OWN = options_of(mc.muon).keys() - options_of(mc.scale_by_muon).keys() | {"mu_dtype"}
OWN -= STEPS


def gradients(step):
    return {
        k: normal((2, step, i), *x.shape) for i, (k, x) in enumerate(PARAMS.items())
    }


def walk(tx, names):
    """The params after four steps; in the first one both decays of Adam cancel."""
    each = ({k: gradients(step)[k] for k in names} for step in range(4))
    return trained(tx, {k: PARAMS[k] for k in names}, each)[0]


@pytest.mark.parametrize("name", sorted(OWN))
def test_the_vector_follows_adamw(name):
    settings = dict(learning_rate=RATE, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    changed = settings | {ADAMW[name]: VALUES[name]}
    if name == "weight_decay_mask":
        changed["mask"] = {"b": VALUES[name]["b"]}
    expected = walk(optax.adamw(**changed), "b")
    unchanged = walk(optax.adamw(**settings), "b")
    assert np.abs(expected["b"] - unchanged["b"]).max() > 1e-4
    actual = walk(mc.muon(**{"learning_rate": RATE, name: VALUES[name]}), PARAMS)
    np.testing.assert_allclose(actual["b"], expected["b"], rtol=1e-5)


@pytest.mark.parametrize("name", sorted(OWN))
def test_the_matrices_follow_the_formula(name):
    """`W - learning_rate (u + weight_decay W)`, whatever Adam is told."""
    options = {"learning_rate": RATE, "weight_decay": 0.1, name: VALUES[name]}
    rate, decay = options["learning_rate"], options["weight_decay"]
    decayed = options.get("weight_decay_mask", dict.fromkeys("wv", True))
    direction = mc.scale_by_muon(mu_dtype=options.get("mu_dtype"))
    matrices = {k: PARAMS[k] for k in "wv"}
    state, update = direction.init(matrices), jax.jit(direction.update)
    for step in range(4):
        u, state = update({k: gradients(step)[k] for k in "wv"}, state)
        matrices = {
            k: w - rate * (u[k] + decay * decayed[k] * w) for k, w in matrices.items()
        }
    actual = walk(mc.muon(**options), PARAMS)
    for k, expected in matrices.items():
        np.testing.assert_allclose(actual[k], expected, rtol=1e-5, atol=1e-6)


ATTENTION = {"layer": query_and_key(8, 2, 4)}
LOGITS = {"layer": {"max_logits": jnp.asarray([400.0, 90.0])}}


SCHEDULES = ["learning_rate", "weight_decay", "adam_weight_decay"]
SCHEDULES += ["beta", "alpha", "threshold"]


@pytest.mark.parametrize(
    "name, wrong",
    one_at_a_time(SCHEDULES, [lambda s: None, lambda s: jnp.ones(2), lambda s: "1"]),
)
def test_a_schedule_that_returns_no_number_is_named(name, wrong):
    """By `init` or by the first update, eager and traced."""
    options = {"learning_rate": 1e-3, name: wrong}
    params = ATTENTION | {"norm": {"scale": jnp.ones(8)}}
    tx = mc.muonclip(**options)

    def step():
        return tx.update(params, tx.init(params), params, attention_stats=LOGITS)

    for run in (step, lambda: jax.eval_shape(step)):
        with pytest.raises(ValueError, match=rf"{name}\b.*(number|threshold of shape)"):
            run()


def test_a_layer_whose_own_schedule_returns_nothing_is_named():
    (layer,) = mc.flax_attention_layers(ATTENTION)
    tx = mc.qk_clip(attention=[layer._replace(threshold=lambda step: None)])
    with pytest.raises(ValueError, match="threshold of layer 'layer' must be a number"):
        tx.init(ATTENTION)


def test_injected_numbers_do_what_plain_ones_do():
    """All at once: `optax.inject_hyperparams` makes arrays and tracers of them."""
    numbers = {k: x for k, x in VALUES.items() if isinstance(x, float)}
    numbers |= {
        "consistent_rms": 0.3,
        "adam_learning_rate": optax.linear_schedule(0.7, 0.1, 3),
    }
    tree = ATTENTION | {"mlp": {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}}
    params, grads = randomize(tree), randomize(tree, 1)
    static = tuple(options_of(mc.muonclip).keys() - numbers.keys())
    injected = optax.inject_hyperparams(mc.muonclip, static_args=static)(**numbers)

    found, expected = (
        trained(tx, params, [grads] * 2, attention_stats=LOGITS)[0]
        for tx in (injected, mc.muonclip(**numbers))
    )
    for x, y in leaf_pairs(found, expected):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, bool, jax.dtypes.float0])
@pytest.mark.parametrize(
    "make", [mc.muon, mc.muonclip, lambda rate: mc.multi_steps(mc.muon(rate), 2)]
)
def test_a_gradient_that_is_no_float_is_named(make, dtype):
    tx = make(1e-3)
    state = tx.init(ATTENTION)
    gradients = jax.tree.map(jnp.zeros_like, ATTENTION)
    gradients["layer"]["key"] = {"kernel": np.zeros((8, 2, 4), dtype)}
    match = r"gradient of 'layer/key/kernel' must be a float, got \w+"
    with pytest.raises(ValueError, match=match):
        tx.update(gradients, state, ATTENTION, attention_stats=LOGITS)
