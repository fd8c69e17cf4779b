"""The ways in which public training code uses optax, a few lines for each.

Every loop is written as the repository writes it and run twice: with the optimizer of
this package, and with Muon by hand, from singular values, alongside `optax.adamw`.
"""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct, traverse_util
from flax.training.train_state import TrainState
from helpers import assert_close, normal, of_newton_schulz
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

PARAMS = {
    "embed": {"embedding": normal(0, 16, 8)},
    "attn": {
        "query": {"kernel": 2 * normal(1, 8, 2, 4)},
        "key": {"kernel": 2 * normal(2, 8, 2, 4)},
        "value": {"kernel": 0.3 * normal(3, 8, 2, 4)},
        "out": {"kernel": 0.3 * normal(4, 2, 4, 8)},
    },
    "up": {"kernel": 0.3 * normal(5, 8, 16), "bias": normal(6, 16)},
    "down": {"kernel": 0.3 * normal(7, 16, 8)},
    "lm_head": {"kernel": 0.3 * normal(8, 8, 16)},
}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 16, (4, 8, 6)))
STEPS = 4


def loss(params, tokens):
    x = params["embed"]["embedding"][tokens]
    query, key, value = (
        jnp.einsum("btd,dhk->bthk", x, params["attn"][name]["kernel"])
        for name in ("query", "key", "value")
    )
    y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x += jnp.einsum("bthk,hkd->btd", y, params["attn"]["out"]["kernel"])
    y = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
    logits = (x + y @ params["down"]["kernel"]) @ params["lm_head"]["kernel"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
    return losses.mean()


gradient = jax.grad(loss)


@functools.cache
def reading():
    return mc.read_model(loss, PARAMS, TOKENS[0])


muon = functools.partial(mc.muon, beta=0.9)


def by_hand(learning_rate, weight_decay=0.1):
    """Muon from singular values where a leaf holds matrices, else `optax.adamw`."""
    adamw = optax.adam(learning_rate, b2=0.95)  # its update wants no params
    if weight_decay:
        adamw = optax.adamw(learning_rate, b2=0.95, weight_decay=weight_decay)

    def init(params):
        return jax.tree.map(jnp.zeros_like, params), adamw.init(params), 0

    def update(grads, state, params=None):
        momentum, adam, count = state
        rest, adam = adamw.update(grads, adam, params)
        rate = learning_rate(count) if callable(learning_rate) else learning_rate
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)

        def step(path, m, g, other, w):
            name = jax.tree_util.keystr(path)
            if "kernel" not in name or "lm_head" in name:
                return other
            is_cut = re.search("query|key|value", name)  # a matrix for each head
            ahead = 0.9 * m + g
            x = ahead.swapaxes(0, 1) if is_cut else ahead.reshape(-1, m.shape[-1])
            u, s, vt = jnp.linalg.svd(x, full_matrices=False)
            s /= jnp.sqrt(jnp.sum(s**2, -1, keepdims=True))
            for a, b, c in mc.NS_COEFFS["keller"]:
                s = a * s + b * s**3 + c * s**5
            o = 0.2 * max(x.shape[-2:]) ** 0.5 * (u * s[..., None, :]) @ vt
            o = o.swapaxes(0, 1) if is_cut else o.reshape(m.shape)
            return -rate * (o + (weight_decay * w if weight_decay else 0.0))

        params = grads if params is None else params
        updates = jax.tree.map_with_path(step, momentum, grads, rest, params)
        return updates, (momentum, adam, count + 1)

    return optax.GradientTransformation(init, update)


def check_same(loop, *arguments):
    """Updates of each step differ by as much as iterated matrices may."""
    ours, theirs = (loop(make, *arguments) for make in (muon, by_hand))
    moved = lambda x: jax.tree.map(lambda new, old: new - old, x, PARAMS)  # noqa: E731
    assert_close(moved(ours), moved(theirs), STEPS * of_newton_schulz(16))
    return ours


def plain_loop(make):
    tx, params = make(0.02), PARAMS
    state, update = tx.init(params), jax.jit(tx.update)
    for tokens in TOKENS:
        updates, state = update(gradient(params, tokens), state, params)
        params = optax.apply_updates(params, updates)
    return params


class OwnTrainState(struct.PyTreeNode):
    """Of kvfrans/jax-diffusion-transformer, which does not use Flax's own."""

    params: Any
    opt_state: Any
    tx: Any = struct.field(pytree_node=False)

    def apply_loss_fn(self, loss_fn, pmap_axis=None):
        grads, info = jax.grad(loss_fn, has_aux=True)(self.params)
        grads = grads if pmap_axis is None else jax.lax.pmean(grads, pmap_axis)
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        return self.replace(params=params, opt_state=opt_state), info


@pytest.mark.more
def test_dit_has_a_train_state_of_its_own():
    """kvfrans/jax-diffusion-transformer: statistics come out as the loss's `info`, and
    the clip follows the step, in `pmap` over two devices."""

    def loop(make, threshold=None):
        tx = make(0.02)
        state = OwnTrainState(PARAMS, tx.init(PARAMS), tx)

        @functools.partial(jax.pmap, axis_name="data", in_axes=(None, 0), out_axes=0)
        def step(state, tokens):
            recorded = mc.record_attention(loss)
            state, stats = state.apply_loss_fn(lambda p: recorded(p, tokens), "data")
            if threshold is None:
                return state
            options = {"model": reading(), "axis_name": "data"}
            return state.replace(
                params=mc.clip_qk(state.params, stats, threshold, **options)
            )

        for tokens in TOKENS:
            state = step(state, tokens.reshape(2, 4, 6))
            state = jax.tree.map(lambda x: x[0], state)
        return state.params

    check_same(loop)
    clipped = loop(lambda rate: mc.muon(0.0), 2.0)
    _, stats = mc.record_attention(loss)(clipped, TOKENS[-1])
    np.testing.assert_array_less(stats["attn"]["max_logits"], 2.0 * (1 + 1e-5))


@pytest.mark.more
def test_seqax_has_all_in_one_shard_map():
    """MatX-inc/seqax: a single `shard_map` holds the loss, its gradient and the
    optimizer; weights are cut along the axis that divides the batch."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    specs = jax.tree.map(lambda x: P("d") if x.ndim == 2 else P(), PARAMS)

    def loop(make):
        if make is by_hand:
            return plain_loop(make)
        named = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        tx = make(0.02, shardings=named, axis_name="d")

        def gathered(x, spec):
            return jax.lax.all_gather(x, "d", tiled=True) if spec == P("d") else x

        def step(params, state, tokens):
            def own_loss(params):
                return loss(jax.tree.map(gathered, params, specs), tokens)

            # The transpose of the gather sums over devices and scatters.
            grads = jax.grad(own_loss)(params)
            count = jax.lax.axis_size("d")
            grads = jax.tree.map(
                lambda g, spec: g / count if spec == P("d") else g, grads, specs
            )
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state = tx.init(PARAMS)
        of_state = optax.tree.map_params(
            tx,
            lambda x, spec: x if isinstance(x, optax.MaskedNode) else spec,
            state,
            specs,
            transform_non_params=lambda _: P(),
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )
        step = jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(specs, of_state, P("d")),
                out_specs=(specs, of_state),
                check_vma=False,
            )
        )
        params = PARAMS
        for tokens in TOKENS:
            params, state = step(params, state, tokens)
        return params

    check_same(loop)


@pytest.mark.more
def test_pure_jax_rl_has_all_in_one_jit():
    """luchris429/purejaxrl: `TrainState.create` and all updates in one `jit`, in scans
    of epochs and minibatches, under `vmap` over seeds, with a rate that falls."""
    falling = optax.linear_schedule(0.02, 0.0, 8)

    def loop(make):
        def train(scale):
            tx = optax.chain(optax.clip_by_global_norm(0.5), make(falling))
            params = jax.tree.map(lambda x: scale * x, PARAMS)
            state = TrainState.create(apply_fn=None, params=params, tx=tx)

            def minibatch(state, tokens):
                return state.apply_gradients(grads=gradient(state.params, tokens)), None

            def epoch(state, _):
                return jax.lax.scan(minibatch, state, TOKENS[:2])[0], None

            return jax.lax.scan(epoch, state, None, 2)[0].params

        trained = jax.jit(jax.vmap(train))(jnp.asarray([1.0, 0.5, 1.5]))
        return jax.tree.map(lambda x: x[2], trained), train(jnp.asarray(1.5))

    # Each seed as if it were alone, and each as by hand.
    (ours, alone), (theirs, _) = loop(muon), loop(by_hand)
    assert_close(ours, alone, STEPS * of_newton_schulz(16))
    assert_close(ours, theirs, STEPS * of_newton_schulz(16))


def masks_of(patterns, params):
    """As big_vision's `make_mask_trees`: the first pattern that matches a path."""
    flat = traverse_util.flatten_dict(params, sep="/")
    first = {
        path: next((i for i, p in enumerate(patterns) if re.fullmatch(p, path)), None)
        for path in flat
    }
    return [
        traverse_util.unflatten_dict({k: v == i for k, v in first.items()}, sep="/")
        for i in range(len(patterns))
    ]


@pytest.mark.more
def test_big_vision_has_rates_and_frozen_leaves_by_regex():
    """google-research/big_vision: `(pattern, schedule)` pairs, each a masked scale at
    the end of the chain; what has no schedule is frozen by `set_to_zero`."""
    patterns = ["embed/.*", "attn/.*", ".*"]
    factors = [None, optax.linear_schedule(1.0, 0.2, 4), lambda step: 0.5]

    def loop(make):
        masks = masks_of(patterns, PARAMS)
        endings = [
            optax.masked(
                optax.set_to_zero() if f is None else optax.scale_by_schedule(f), mask
            )
            for f, mask in zip(factors, masks, strict=True)
        ]
        tx = optax.chain(optax.clip_by_global_norm(1.0), make(0.02), *endings)
        params, state = PARAMS, tx.init(PARAMS)
        for tokens in TOKENS:
            updates, state = tx.update(gradient(params, tokens), state, params)
            params = optax.apply_updates(params, updates)
        return params

    ours = check_same(loop)
    np.testing.assert_array_equal(
        ours["embed"]["embedding"], PARAMS["embed"]["embedding"]
    )


@pytest.mark.more
def test_brax_updates_under_pmap_without_params():
    """google/brax: gradients are averaged by `pmean` in `pmap`, and the optimizer, a
    clip by norm before it, gets no params."""

    def loop(make):
        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), make(0.02, weight_decay=0.0)
        )

        @functools.partial(jax.pmap, axis_name="i")
        def step(params, state, tokens):
            grads = jax.lax.pmean(gradient(params, tokens), "i")
            updates, state = optimizer.update(grads, state)
            return optax.apply_updates(params, updates), state

        params, state = jax.tree.map(
            lambda x: jnp.stack([x] * 2), (PARAMS, optimizer.init(PARAMS))
        )
        for tokens in TOKENS:
            params, state = step(params, state, tokens.reshape(2, 4, 6))
        jax.tree.map(lambda x: np.testing.assert_array_equal(*x), params)
        return jax.tree.map(lambda x: x[0], params)

    check_same(loop)


class Layer(eqx.Module):
    """A module that has a function and a number alongside its arrays."""

    params: dict
    activation: Any
    scale: float


@pytest.mark.more
def test_equinox_filters_what_is_differentiated():
    """patrick-kidger/equinox: `filter_jit`, `filter_value_and_grad`, `eqx.filter` for
    `init`, `apply_updates`; the state is a part of what `filter_jit` takes."""

    def loop(make):
        tx, model = make(0.02), Layer(PARAMS, jnp.tanh, 1.0)
        state = tx.init(eqx.filter(model, eqx.is_inexact_array))

        @eqx.filter_jit
        def step(model, state, tokens):
            grads = eqx.filter_grad(lambda m: m.scale * loss(m.params, tokens))(model)
            shown = eqx.filter(model, eqx.is_inexact_array)
            updates, state = tx.update(grads, state, shown)
            return eqx.apply_updates(model, updates), state

        for tokens in TOKENS:
            model, state = step(model, state, tokens)
        assert model.activation is jnp.tanh
        return model.params

    check_same(loop)


@pytest.mark.more
def test_lookahead_of_fast_and_slow_params():
    """google-deepmind/optax, `lookahead` (as Ranger uses it): the optimizer sees the
    fast params alone."""

    def loop(make):
        tx = optax.lookahead(make(0.02), sync_period=2, slow_step_size=0.5)
        params = optax.LookaheadParams.init_synced(PARAMS)
        state = tx.init(params)
        for tokens in TOKENS:
            updates, state = tx.update(gradient(params.fast, tokens), state, params)
            params = optax.apply_updates(params, updates)
        return params.slow

    check_same(loop)
