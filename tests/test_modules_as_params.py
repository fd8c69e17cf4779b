"""The functions that look take modules of NNX and Equinox as they take params."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import inputs, nnx_model, nnx_stats

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")


class NNXMixed(nnx.Module):
    """State of its own alongside the parameters: statistics, a key, a counter."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(24, 8, rngs=rngs)
        self.up, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(16, 24, rngs=rngs)
        self.steps = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, tokens):
        x = self.norm(self.up(self.embed(tokens)))
        return self.head(self.dropout(jax.nn.relu(x)))


class EquinoxMixed(eqx.Module):
    """Leaves that are no parameters: a function, whole numbers, a flag."""

    embed: eqx.nn.Embedding
    mlp: eqx.nn.MLP
    order: jax.Array
    scale: float = 2.0

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)[self.order]
        return self.scale * jax.vmap(self.mlp)(x)


def nnx_mixed():
    model = NNXMixed(nnx.Rngs(0))
    return model, nnx.state(model, nnx.Param)


def equinox_mixed():
    keys = jax.random.split(jax.random.key(0))
    mlp = eqx.nn.MLP(8, 24, 16, 2, key=keys[1])
    model = EquinoxMixed(eqx.nn.Embedding(24, 8, key=keys[0]), mlp, jnp.arange(6))
    return model, eqx.filter(model, eqx.is_inexact_array)


def two_of_equinox():
    """A tree of modules, as of an encoder and a decoder."""
    model, params = equinox_mixed()
    return {"a": model, "b": [model]}, {"a": params, "b": [params]}


def loss(model, tokens):
    modules = jax.tree.leaves(model, is_leaf=callable)
    return sum(jnp.mean(module(tokens) ** 2) for module in modules if callable(module))


TOKENS = jnp.arange(6)
MODULES = {"nnx": nnx_mixed, "equinox": equinox_mixed, "two": two_of_equinox}


def same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert jax.tree.leaves(found) == jax.tree.leaves(expected)


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_what_is_said_of_a_module_is_said_of_what_its_optimizer_is_given(name, is_read):
    module, params = MODULES[name]()
    model = None
    if is_read and name != "two":
        model = mc.read_model(loss, module, TOKENS)
    for look in (mc.param_labels, mc.matrix_mask, mc.describe):
        same(look(module, model=model), look(params, model=model))
    labels = mc.param_labels(module, model=model)
    # A tree that optax takes with the params of the optimizer.
    assert jax.tree.structure(labels) == jax.tree.structure(params)
    assert {"matrix", "embedding"} <= set(jax.tree.leaves(labels))
    tx = optax.inject_hyperparams(mc.muon, static_args=("model",))(0.1, model=model)
    state, updates = tx.init(params), jax.tree.map(lambda x: 2 * x, params)
    found = mc.scalars(state, module, updates=updates, model=model)
    assert found == mc.scalars(state, params, updates=updates, model=model)
    squares = (np.square(np.float64(x)).sum() for x in jax.tree.leaves(params))
    whole = np.sqrt(sum(squares))
    for kind, size in (("param_norm", whole), ("update_norm", 2 * whole)):
        own = [x for name, x in found.items() if name.startswith(kind)]
        np.testing.assert_allclose(np.linalg.norm(own), size, rtol=1e-5)


def test_a_module_of_shapes():
    abstract = eqx.filter_eval_shape(lambda: equinox_mixed()[0])
    _, params = equinox_mixed()
    labels = mc.param_labels(abstract)
    assert jax.tree.leaves(labels) == jax.tree.leaves(mc.param_labels(params))
    abstract = nnx.eval_shape(lambda: NNXMixed(nnx.Rngs(0)))
    same(mc.param_labels(abstract), mc.param_labels(nnx_mixed()[1]))


def test_labels_of_a_module_part_its_optimizer():
    """Each group has the update of its own optimizer."""
    module, params = nnx_mixed()
    before, labels = jax.tree.map(jnp.copy, params), mc.param_labels(module)
    rates = {x: 2.0**-i for i, x in enumerate(sorted(set(jax.tree.leaves(labels))))}
    groups = {label: optax.sgd(rate) for label, rate in rates.items()}
    tx = optax.partition(groups, mc.param_labels)
    optimizer = nnx.Optimizer(module, tx, wrt=nnx.Param)
    optimizer.update(module, jax.tree.map(jnp.ones_like, params))
    moved = jax.tree.map(lambda x, y: x - y, before, nnx.state(module, nnx.Param))
    for label, step in zip(*map(jax.tree.leaves, (labels, moved)), strict=True):
        np.testing.assert_allclose(step, rates[label], rtol=1e-5)


def test_an_nnx_optimizer_and_its_module_inside_nnx_jit():
    model = nnx_model()
    tx = optax.inject_hyperparams(mc.muonclip)(0.25)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    numbers = functools.partial(mc.scalars, heads=True)
    traced = nnx.jit(lambda m, o: numbers(o.opt_state, m))(model, optimizer)
    assert traced["gamma/layers/0/head_3"] == 1
    assert traced["hyperparams/learning_rate"] == 0.25
    found = numbers(optimizer.opt_state, model)
    unknown = {name for name in traced if name.startswith("max_logit")}
    assert found.keys() == traced.keys() - unknown and unknown
    assert "query, 4 heads" in mc.describe(model)


@pytest.mark.parametrize("look", [mc.describe, mc.param_labels, mc.matrix_mask])
def test_numbers_in_a_tree_that_is_no_module_are_asked_about(look):
    with pytest.raises(ValueError, match="no arrays: 'gain'"):
        look({"gain": 2.0, "w": jnp.ones((2, 2))})


@pytest.mark.more
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_threshold_set_in_an_nnx_optimizer_stays_a_variable(is_wrapped):
    """The next step obeys it and is not compiled again; checkpoints keep it."""
    model, traces = nnx_model(), []
    tx = optax.inject_hyperparams(mc.muonclip)(0.0)
    if is_wrapped:
        groups = {"trained": tx, "frozen": optax.set_to_zero()}
        tx = optax.partition(groups, lambda p: jax.tree.map(lambda _: "trained", p))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = nnx.state(model, nnx.Param)
    stats = nnx_stats(model, inputs())
    assert min(x.max() for x in jax.tree.leaves(stats)) > 1e-3

    @nnx.jit
    def step(model, optimizer):
        traces.append(1)
        optimizer.update(model, grads, attention_stats=stats)
        return mc.scalars(optimizer.opt_state, model)["num_clipped"]

    assert step(model, optimizer) == 0
    kept = jax.tree.structure(nnx.state(optimizer))
    optax.tree.get(optimizer.opt_state, "threshold")[...] = 1e-3
    assert step(model, optimizer) > 0 and len(traces) == 1
    assert jax.tree.structure(nnx.state(optimizer)) == kept
