"""`optax.tree.map_params` finds what is like the params in any state of ours.

It calls `init` with a tree that stands for any params and has none, so that no pattern
matches, no path is there and a function of the params has nothing to look at.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import nnx_model, normal

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

PARAMS = {
    "embed": normal(0, 10, 8),
    "attn": {name: {"kernel": normal(i, 8, 2, 4)} for i, name in enumerate("qkv")},
    "teacher": normal(3, 8, 16),
    "up": {"kernel": normal(4, 8, 16), "bias": normal(5, 16)},
    "head": normal(6, 16, 10),
}


def loss(p, tokens):
    x = p["embed"][tokens]
    query, key, value = (
        jnp.einsum("btd,dhf->bthf", x, p["attn"][name]["kernel"]) for name in "qkv"
    )
    x += jax.nn.dot_product_attention(query, key, value).reshape(x.shape)
    x = jnp.tanh(x @ p["up"]["kernel"] + p["up"]["bias"])
    return jnp.mean(((x + jax.lax.stop_gradient(x @ _square(p))) @ p["head"]) ** 2)


def _square(p):
    return p["teacher"].T @ p["teacher"]


@functools.cache
def reading():
    return mc.read_model(loss, PARAMS, jnp.zeros((2, 3), int))


def is_matrix(params):
    return mc.matrix_mask(params, model=reading())


def by_key(params):
    """A function that only params with these very keys can be given to."""
    rest = dict.fromkeys(set(params) - {"up"})
    return rest | {"up": {"kernel": mc.MuonDimensionNumbers(0, 1), "bias": None}}


def chain_by_hand(**options):
    return optax.chain(
        optax.masked(mc.scale_by_muon(model=reading(), **options), is_matrix),
        optax.masked(mc.normalize_neurons(model=reading()), is_matrix),
        optax.masked(
            optax.scale_by_adam(), lambda p: jax.tree.map(operator.not_, is_matrix(p))
        ),
        mc.qk_clip(model=reading()),
    )


def clipped(**options):
    return mc.muonclip(0.1, model=reading(), **options)


def injected():
    make = optax.inject_hyperparams(mc.muon, static_args=("dimension_numbers",))
    return make(0.1, dimension_numbers=PATTERNS)


PATTERNS = {"up/*": None, "attn/?/kernel": "auto"}
SET_UPS = {
    "patterns": lambda: mc.muon(0.1, dimension_numbers=PATTERNS),
    "a function to patterns": lambda: mc.muon(
        0.1, dimension_numbers=lambda params: {"up/*": None}
    ),
    "a function of keys": lambda: mc.muon(0.1, dimension_numbers=by_key),
    "a tree": lambda: mc.muon(0.1, dimension_numbers=by_key(PARAMS)),
    "a reading with a frozen leaf": clipped,
    "a reading and patterns": lambda: clipped(dimension_numbers=PATTERNS),
    "8 bits and neurons": lambda: clipped(mu_dtype="int8", neuron_b2=0.9),
    "masks by keys": lambda: clipped(
        weight_decay_mask=lambda p: {k: k == "up" for k in [*p, *PARAMS]}
    ),
    "schedules": lambda: mc.muonclip(
        optax.constant_schedule(0.1), beta=lambda step: 0.5, model=reading()
    ),
    "attention by hand": lambda: mc.muonclip(0.1, attention=reading().attention),
    "multi_steps": lambda: mc.multi_steps(clipped(), 2, model=reading()),
    "inject_hyperparams": injected,
    "chain by hand": chain_by_hand,
    "chain by hand in 8 bits": lambda: chain_by_hand(mu_dtype="int8"),
    "partition": lambda: optax.partition(
        {True: mc.scale_by_muon(model=reading()), False: optax.adam(0.1)}, is_matrix
    ),
}


def named(tx, state, params):
    """The state's leaves that are like params, as what they are given of the params."""
    paths = jax.tree.map_with_path(lambda path, _: jax.tree_util.keystr(path), params)
    found = optax.tree.map_params(
        tx,
        lambda x, path: x if isinstance(x, optax.MaskedNode) else path,
        state,
        paths,
        transform_non_params=lambda _: None,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    leaves = jax.tree.leaves_with_path(found)
    return {jax.tree_util.keystr(at): path for at, path in leaves}


@pytest.mark.parametrize("name", SET_UPS)
def test_what_is_like_a_param_and_nothing_else(name):
    tx = SET_UPS[name]()
    state = tx.init(PARAMS)
    shapes = {
        jax.tree_util.keystr(path): x.shape
        for path, x in jax.tree.leaves_with_path(PARAMS)
    }
    expected = {}
    for keys, x in jax.tree.leaves_with_path(state):
        at = jax.tree_util.keystr(keys)
        # NorMuon's are by path too, but have another shape.
        found = [k for k in shapes if at.endswith(k) and x.shape == shapes[k]]
        if found:
            expected[at] = found[0]
    assert len(expected) > 4
    assert named(tx, state, PARAMS) == expected


@pytest.mark.more
def test_of_an_nnx_model_and_after_a_step():
    params = nnx.to_pure_dict(nnx.state(nnx_model(), nnx.Param))
    kernels = {"*kernel": "auto", "*bias": None}
    tx = mc.muon(0.1, dimension_numbers=kernels, mu_dtype="int8", neuron_b2=0.9)
    first = tx.init(params)
    _, state = tx.update(params, first, params)
    assert named(tx, state, params) == named(tx, first, params)
    zeroed = optax.tree.map_params(tx, jnp.zeros_like, state)
    is_zero = [not np.any(x) for x in jax.tree.leaves(zeroed)]
    # What is by path stays, as do counts; momentum and Adam's two are gone.
    assert sum(is_zero) >= len(named(tx, first, params)) and not all(is_zero)
    assert jax.tree.structure(zeroed) == jax.tree.structure(state)
