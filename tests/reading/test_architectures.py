"""Whole models: what is said of them, by reading and by names; read, clipped, trained.

Right is what an expert calls a leaf and what is computed: the models themselves note
their largest logits, layer by layer.
"""

import functools
import re

import jax
import jax.numpy as jnp
import models_of_space as space
import numpy as np
import optax
import pytest
import whole_models as whole
from architectures import ARCHITECTURES
from by_numbers import by_path
from helpers import few, is_numbers, normal
from mixtures import delta_rule
from written_out import Leaf, unit

import muonclip_jax as mc


MODELS = ARCHITECTURES | {
    "Kimi Linear in chunks": whole.KIMI_LINEAR,
    "Qwen3-Next in chunks": whole.QWEN3_NEXT,
    "Qwen3-Next in chunks, one added": whole.QWEN3_NEXT_ADDED,
    "simply": whole.SIMPLY,
    "xLSTM": whole.XLSTM,
    "xLSTM, recurrent": whole.XLSTM_RECURRENT,
    "MViT by means": space.MVIT_BY_MEANS,
    "MViT by maxima": space.MVIT_BY_MAXIMA,
    "MViT by windows": space.MVIT_BY_WINDOWS,
    "PaiNN": space.PAINN,
    "PaiNN by energies": space.PAINN_BY_ENERGIES,
    "PaiNN by forces": space.PAINN_BY_FORCES,
}
#: All heads share the gains of query and key, so that one factor serves them all.
JOINT = "Qwen3-Next in chunks, one added"
OF_XLSTM = {f"blocks/0/mlstm/{gate}" for gate in ("igate", "fgate")}
#: Projections to one number for each stream or head, which go to AdamW in the field. A
#: reading sees what they are where their outputs alone scale another kernel's, not in
#: exponentials of two gates, nor where they scale a product of activations.
KNOWN = {
    "hyper-connections": {
        f"layers/{i}/{of}_hyper_connection/dynamic_alpha_fn"
        for i in range(2)
        for of in ("attn", "ffn")
    },
    "Kimi Linear in chunks": {"layers/0/mixer/beta", "layers/2/mixer/beta"},
    "xLSTM": OF_XLSTM,
    "xLSTM, recurrent": OF_XLSTM,
}
SHORT = "Qwen3-Next in chunks", "simply", "xLSTM", "MViT by means", "PaiNN"
EVERY_DAY = few(MODELS, *ARCHITECTURES, *SHORT)
CLIPPED = [name for name, model in MODELS.items() if model.layers]


def expected(model):
    return by_path(model.leaves, lambda x: isinstance(x, Leaf))


def shapes(model):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32),
        model.leaves,
        is_leaf=lambda x: isinstance(x, Leaf),
    )


def differing(leaves, labels, numbers):
    """What is said of leaves in another way, with axes counted from the front."""

    def in_front(axes, rank):
        return axes % rank if isinstance(axes, int) else tuple(i % rank for i in axes)

    labels, numbers = by_path(labels), by_path(numbers, is_numbers)
    assert labels.keys() == leaves.keys()
    found = {
        path: Leaf(
            leaf.shape,
            labels[path],
            *(in_front(axes, len(leaf.shape)) for axes in numbers[path] or ()),
        )
        for path, leaf in leaves.items()
    }
    return {path: found[path] for path in leaves if found[path] != leaves[path]}


def loss_of(name):
    def loss(params, *inputs):  # takes no maximum but the softmax's own
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


@pytest.mark.parametrize("name", EVERY_DAY)
def test_leaves_are_what_an_expert_calls_them(name):
    reading, leaves = read(name), expected(MODELS[name])
    assert not reading.unknown
    wrong = differing(leaves, reading.labels, reading.dimension_numbers)
    assert wrong.keys() == KNOWN.get(name, set()), wrong
    assert all(leaf == Leaf(leaf.shape, "matrix", 0, 1) for leaf in wrong.values())


@pytest.mark.parametrize("name", EVERY_DAY)
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


def test_products_that_weigh_without_a_softmax_are_named():
    """Of the parallel form; the recurrent one has no product that weighs."""
    named = dict(said.split(" at ", 1) for said in read("xLSTM").not_clipped)
    assert named.keys() == {"blocks/0/mlstm"}
    assert all("whole_models.py" in line for line in named.values())
    assert not read("xLSTM, recurrent").not_clipped


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_names_alone_are_right_or_ask(name):
    params, leaves = shapes(MODELS[name]), expected(MODELS[name])
    for path, leaf in leaves.items():  # names do not show what acts by a choice alone
        leaves[path] = leaf._replace(label="vector") if leaf.label == "frozen" else leaf
    patterns = None
    try:
        mc.param_labels(params)
    except ValueError as error:
        asked = re.findall(r"^  (\S+) \(\d", str(error), re.M)
        patterns = dict.fromkeys(leaves.keys() & {*asked})
        assert patterns and "mc.read_model" in str(error)
    labels = mc.param_labels(params, dimension_numbers=patterns)
    numbers = mc.flax_dimension_numbers(params, dimension_numbers=patterns)
    wrong = differing(leaves, labels, numbers)
    assert wrong.keys() <= (patterns or {}).keys(), wrong


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
    found, expected = whole.mlstm_parallel(*every), whole.mlstm_recurrent(*every)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", few(CLIPPED, "DiT"))
def test_recorded_logits_are_those_noted(name):
    params, inputs = arrays(name)
    value, stats = jax.jit(mc.record_attention(loss_of(name)))(params, *inputs)
    expected = jax.jit(loss_of(name))(params, *inputs)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    largest, layers = noted(name)(params, *inputs), MODELS[name].layers
    found = {path.removesuffix("/max_logits"): x for path, x in by_path(stats).items()}
    assert found.keys() == largest.keys() == layers.keys()
    for path, right in largest.items():
        assert np.unique(right).size == right.size  # heads cannot be mistaken
        assert found[path].shape == right.shape == (layers[path].heads,)
        np.testing.assert_allclose(found[path], right, rtol=1e-5)


def clipped_alone(name):
    """Each layer clipped by itself, so that its input stays, and by which threshold.

    Statistics of the others are far under any threshold.
    """
    params, inputs = arrays(name)
    largest = noted(name)(params, *inputs)
    for path, before in largest.items():
        threshold = float(np.median(before))  # some heads are over it, some are not
        stats: dict = {}
        for other, x in largest.items():
            inner = stats
            for part in other.split("/"):
                inner = inner.setdefault(part, {})
            inner["max_logits"] = x if other == path else jnp.zeros_like(x)
        clipped = mc.clip_qk(params, stats, threshold, alpha=0.3, model=read(name))
        yield path, np.asarray(before), threshold, clipped


@pytest.mark.parametrize("name", few(CLIPPED, "DiT", "AlphaFold"))
def test_each_head_over_the_threshold_reaches_it(name):
    for path, before, threshold, clipped in clipped_alone(name):
        after = noted(name)(clipped, *arrays(name)[1])[path]
        as_one = before * threshold / before.max()
        right = as_one if name == JOINT else np.minimum(before, threshold)
        np.testing.assert_allclose(after, right, rtol=1e-4)


OF_WHOLE_MODELS = [name for name in MODELS if name not in ARCHITECTURES]


@pytest.mark.parametrize(
    "name", few([x for x in OF_WHOLE_MODELS if x in CLIPPED and x != JOINT])
)
def test_heads_under_the_threshold_stay_bit_for_bit(name):
    """No entry moves that their logits depend on, and none of another layer."""
    params, inputs = arrays(name)
    slopes = jax.jit(jax.jacrev(noted(name)))(params, *inputs)
    for path, before, threshold, clipped in clipped_alone(name):
        old, new, slope = map(by_path, (params, clipped, slopes[path]))
        moved = {k: np.asarray(old[k]) != np.asarray(new[k]) for k in old}
        changed = [leaf for leaf, x in moved.items() if x.any()]
        assert changed and all(leaf.startswith(f"{path}/") for leaf in changed)
        for head in np.flatnonzero(before <= threshold):
            for leaf in changed:
                is_used = np.asarray(slope[leaf][head]) != 0
                assert not np.any(moved[leaf] & is_used), (head, leaf)


@pytest.mark.parametrize(
    "name", few([x for x in OF_WHOLE_MODELS if not MODELS[x].refused])
)
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
