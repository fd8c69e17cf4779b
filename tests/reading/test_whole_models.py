"""Whole models, read, recorded, clipped and trained.

Right is what an expert calls a leaf and what is computed: the models themselves note
their largest logits, layer by layer.
"""

import functools

import exponential_gates as gates
import jax
import jax.numpy as jnp
import models_of_space as space
import numpy as np
import optax
import pytest
import whole_models as whole
from helpers import few, normal
from mixtures import delta_rule
from test_architectures import differing, expected, flat, said, shapes
from written_out import Leaf, unit

import muonclip_jax as mc


MODELS = {
    "Kimi Linear": whole.KIMI_LINEAR,
    "Qwen3-Next": whole.QWEN3_NEXT,
    "Qwen3-Next, one added": whole.QWEN3_NEXT_ADDED,
    "simply": whole.SIMPLY,
    "xLSTM": gates.XLSTM,
    "xLSTM, recurrent": gates.XLSTM_RECURRENT,
    "MViT by means": space.MVIT_BY_MEANS,
    "MViT by maxima": space.MVIT_BY_MAXIMA,
    "MViT by windows": space.MVIT_BY_WINDOWS,
    "PaiNN": space.PAINN,
    "PaiNN by energies": space.PAINN_BY_ENERGIES,
    "PaiNN by forces": space.PAINN_BY_FORCES,
}
#: All heads share the gains of query and key, so that one factor serves them all.
JOINT = "Qwen3-Next, one added"
#: No force depends on what is added to every energy.
UNUSED = {"PaiNN by forces": {"readout/b2"}}
CLIPPED = [name for name, model in MODELS.items() if model.layers]


def loss_of(name):
    def loss(params, *inputs):
        return MODELS[name].loss(params, *inputs, None)

    return loss


@functools.cache
def read(name):
    return mc.read_model(loss_of(name), shapes(MODELS[name]), *MODELS[name].inputs)


@functools.cache
def arrays(name):
    """Params as large as networks have them, gains near one, and inputs."""

    def drawn(i, path, leaf):
        if leaf.label == "vector":
            is_gain = not path.endswith(("bias", "b1", "b2"))
            return is_gain + normal((1, i), *leaf.shape, scale=0.3)
        axes = leaf.inputs if leaf.label == "matrix" else 0
        fan_in = np.prod(np.take(leaf.shape, axes))
        return normal((1, i), *leaf.shape, scale=1.4 * fan_in**-0.5)

    leaves, treedef = expected(MODELS[name]), jax.tree.structure(shapes(MODELS[name]))
    generator = np.random.default_rng(2)
    inputs = [
        normal((3, i), *x.shape, scale=1.5)
        if jnp.issubdtype(x.dtype, jnp.floating)
        else jnp.asarray(generator.integers(4, size=x.shape), x.dtype)
        for i, x in enumerate(MODELS[name].inputs)
    ]
    params = [drawn(i, *item) for i, item in enumerate(leaves.items())]
    return treedef.unflatten(params), inputs


@functools.cache
def noted(name):
    """The largest logits by layer, as the model notes them."""

    @jax.jit
    def run(params, *inputs):
        seen = {}
        MODELS[name].loss(params, *inputs, seen)
        return seen

    return run


#: Kernels that make one number for each head, where experts differ: Qwen gives them to
#: AdamW. A reading sees what they are where their outputs alone scale another kernel's,
#: not in exponentials of two gates, nor where they scale a product of activations.
EITHER = {"blocks/0/mlstm/igate", "blocks/0/mlstm/fgate"}
EITHER |= {"layers/0/mixer/beta", "layers/2/mixer/beta"}

SHORT = "Qwen3-Next", "simply", "xLSTM", "MViT by means", "PaiNN"


@pytest.mark.parametrize("name", few(MODELS, *SHORT))
def test_leaves_are_what_an_expert_calls_them(name):
    reading, leaves = read(name), expected(MODELS[name])
    assert set(reading.unknown) <= UNUSED.get(name, set())
    found = said(leaves, reading.labels, reading.dimension_numbers)
    wrong = {
        path: leaf
        for path, leaf in differing(found, leaves).items()
        if path not in EITHER or leaf != Leaf(leaf.shape, "matrix", 0, 1)
    }
    assert not wrong, {path: (leaf, leaves[path]) for path, leaf in wrong.items()}


@pytest.mark.parametrize("name", few(MODELS, *SHORT))
def test_attention_is_where_a_softmax_is(name):
    model, reading = MODELS[name], read(name)
    found = {
        layer.path: tuple(
            tuple(leaf.path for leaf in leaves)
            for leaves in (layer.query, layer.key, layer.rotary_query)
        )
        for layer in reading.attention
    }
    assert found == {path: layer[1:] for path, layer in model.layers.items()}
    # Norms of query and key whose gains are differences from one: nothing else is
    # refused, delta rules, exponential gates and messages least of all.
    paths = tuple(why.split(" at ")[0] for why in reading.refused)
    assert paths == model.refused
    assert all("gain of 1 + g" in why for why in reading.refused)


def _at(said):
    return said.split(" at ", 1)


def test_products_that_weigh_without_a_softmax_are_named():
    """Of the parallel form; the recurrent one has no product that weighs."""
    named = dict(_at(x) for x in read("xLSTM").not_clipped)
    assert named.keys() == {"blocks/0/mlstm"}
    assert all("exponential_gates.py" in line for line in named.values())
    assert not read("xLSTM, recurrent").not_clipped


# The models are what they say: each form equals the one token by token.


def _heads(seed, scale=1.0):
    return normal(seed, whole.B, whole.T, whole.H, whole.K, scale=scale)


@pytest.mark.parametrize("of_channels", few([True, False]))
def test_chunks_of_a_delta_rule_are_its_recurrence(of_channels):
    query, key, value = unit(_heads(1)), unit(_heads(2)), _heads(3)
    decay = -jnp.abs(_heads(4, 0.5))
    beta = jax.nn.sigmoid(_heads(5)[..., 0])
    if of_channels:
        out = whole.kimi_delta_rule(query, key, value, decay, beta)
    else:
        decay = decay[..., :1]
        out = whole.gated_delta_rule(query, key, value, decay[..., 0], beta)
    one_by_one = delta_rule(
        query, key, value, jnp.exp(decay)[..., None], beta[..., None]
    )
    np.testing.assert_allclose(out, one_by_one.reshape(out.shape), rtol=2e-4, atol=2e-5)


@pytest.mark.more
def test_the_forms_of_an_mlstm_agree():
    query, key, value, raw = (_heads(i, 2.0).swapaxes(1, 2) for i in range(4))
    every = query, key, value, raw[..., 0], raw[..., 1]
    np.testing.assert_allclose(
        gates.mlstm_parallel(*every),
        gates.mlstm_recurrent(*every),
        rtol=1e-3,
        atol=1e-4,
    )


@pytest.mark.parametrize("name", few(CLIPPED))
def test_recorded_logits_are_those_noted(name):
    params, inputs = arrays(name)
    value, stats = jax.jit(mc.record_attention(loss_of(name)))(params, *inputs)
    np.testing.assert_allclose(
        value, jax.jit(loss_of(name))(params, *inputs), rtol=1e-5
    )
    largest = noted(name)(params, *inputs)
    found = {path.removesuffix("/max_logits"): x for path, x in flat(stats).items()}
    assert found.keys() == largest.keys()
    for path, layer in MODELS[name].layers.items():
        right = largest[path]
        assert np.unique(right).size == right.size  # heads cannot be mistaken
        assert found[path].shape == right.shape == (layer.heads,)
        np.testing.assert_allclose(found[path], right, rtol=1e-5)


def with_stats(largest, path):
    """Statistics of one layer; those of the others are far under any threshold."""
    stats: dict = {}
    for other, x in largest.items():
        inner = stats
        for name in other.split("/"):
            inner = inner.setdefault(name, {})
        inner["max_logits"] = x if other == path else jnp.zeros_like(x)
    return stats


@pytest.mark.parametrize("name", few(CLIPPED))
def test_each_head_over_the_threshold_reaches_it(name):
    """One layer at a time, so that its input stays."""
    params, inputs = arrays(name)
    largest = noted(name)(params, *inputs)
    for path, before in largest.items():
        threshold = float(np.sort(before)[-2:].mean())  # one head is over it
        stats = with_stats(largest, path)
        clipped = mc.clip_qk(params, stats, threshold, alpha=0.3, model=read(name))
        after = noted(name)(clipped, *inputs)[path]
        as_one = before * threshold / before.max()
        right = as_one if name == JOINT else np.minimum(before, threshold)
        np.testing.assert_allclose(after, right, rtol=1e-4)


@pytest.mark.parametrize("name", few([x for x in CLIPPED if x != JOINT]))
def test_heads_under_the_threshold_stay_bit_for_bit(name):
    """No entry moves that their logits depend on, and none of another layer."""
    params, inputs = arrays(name)
    largest = noted(name)(params, *inputs)
    slopes = jax.jit(jax.jacrev(noted(name)))(params, *inputs)
    for path, before in largest.items():
        threshold = float(np.sort(before)[-2:].mean())
        stats = with_stats(largest, path)
        clipped = mc.clip_qk(params, stats, threshold, alpha=0.3, model=read(name))
        old, new, slope = flat(params), flat(clipped), flat(slopes[path])
        moved = {k: np.asarray(old[k]) != np.asarray(new[k]) for k in old}
        changed = [leaf for leaf, x in moved.items() if x.any()]
        assert changed and all(leaf.startswith(f"{path}/") for leaf in changed)
        for head in np.flatnonzero(np.asarray(before) <= threshold):
            for leaf in changed:
                is_used = np.asarray(slope[leaf][head]) != 0
                assert not np.any(moved[leaf] & is_used), (head, leaf)


TRAINED = [name for name, model in MODELS.items() if not model.refused]


@pytest.mark.parametrize("name", few(TRAINED))
def test_it_trains_under_its_threshold(name):
    params, inputs = arrays(name)
    first = noted(name)(params, *inputs)
    most = max((float(x.max()) for x in first.values()), default=10.0)
    threshold = 0.5 * most
    tx = mc.muonclip(0.01, threshold=threshold, model=read(name))

    @jax.jit
    def step(params, state):
        recorded = jax.value_and_grad(mc.record_attention(loss_of(name)), has_aux=True)
        (value, stats), grads = recorded(params, *inputs)
        updates, state = tx.update(grads, state, params, attention_stats=stats)
        return optax.apply_updates(params, updates), state, value

    state, values = tx.init(params), []
    for _ in range(20):
        params, state, value = step(params, state)
        values.append(float(value))
    assert values[-1] < 0.9 * values[0], values
    for path, largest in noted(name)(params, *inputs).items():
        assert np.all(np.asarray(largest) < 1.2 * threshold), (path, largest)
