"""Layers that a function puts together itself: each keeps its own number and clip.

The oracle is the same network as a Python loop over its layers. It has the maximum of
every layer and head, and what a clip leaves of it on the same input to the layer.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import few, is_numbers, more

import muonclip_jax as mc


D, H, T, B = 8, 2, 4, 2
N = D // H


class Way(NamedTuple):
    """A way of putting layers together.

    - `params`: from a key to the params, as they are stored.
    - `layers`: from the params to the layers in the order in which they run.
    - `run`: from params and input to the output.
    - `block`: one layer.
    """

    params: Callable[[Any], Any]
    layers: Callable[[Any], list[Any]]
    run: Callable[[Any, Any], Any]
    block: Callable[[Any, Any], Any]


def logits(p: Mapping[str, Any], h: Any) -> Any:
    """Returns the logits of one layer, `(batch, heads, T, T)`."""
    made = {}
    for name in "qk":
        x = h @ p[name] + p.get(f"{name}_bias", 0)
        x = x.reshape(*x.shape[:-1], -1, N)
        if f"{name}_gain" in p:
            x = x / jnp.linalg.norm(x, axis=-1, keepdims=True) * p[f"{name}_gain"]
        made[name] = jnp.repeat(x, H // x.shape[-2], -2)
    return jnp.einsum("bthd,bshd->bhts", made["q"], made["k"])


def block(p: Mapping[str, Any], h: Any) -> Any:
    v = (h @ p["v"]).reshape(*h.shape[:-1], H, N)
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits(p, h)), v)
    return h / 2 + mixed.reshape(h.shape) / 8


def kernels(key: Any, count: int, names: str = "qkv") -> dict[str, Any]:
    """Returns stacks of kernels; each layer and head has another scale."""
    scale = 0.3 + 0.1 * jnp.arange(count)[:, None, None]
    scale = scale * (1 + jnp.arange(D) // N)
    keys = jax.random.split(key, len(names))
    pairs = zip(names, keys, strict=True)
    return {n: jax.random.normal(k, (count, D, D)) * scale for n, k in pairs}


def picked(stack: Any, i: Any) -> Any:
    return jax.tree.map(lambda x: x[i], stack)


def rows(stack: Any, *which: int) -> list[Any]:
    return [picked(stack, i) for i in which]


def apart(key: Any, count: int = 3) -> dict[str, Any]:
    """Returns layers as separate leaves."""
    stack = kernels(key, count)
    return {f"block_{i:02}": x for i, x in enumerate(rows(stack, *range(count)))}


def stacked(layers: Any) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), *layers)


def concatenated(*stacks: Any) -> Any:
    return jax.tree.map(lambda *x: jnp.concatenate(x), *stacks)


def scanned(stack: Any, h: Any, one: Any = block, **how: Any) -> Any:
    return jax.lax.scan(lambda h, p: (one(p, h), None), h, stack, **how)[0]


def values(p: Any) -> list[Any]:
    return [*p.values()]


def of_leaves(run: Any, count: int = 3, one: Any = block) -> Way:
    """A way of running layers that are separate leaves."""
    params = functools.partial(apart, count=count)
    return Way(params, values, lambda p, h: run(values(p), h), one)


def of_stack(run: Any, order: list[int], count: int = 3, one: Any = block) -> Way:
    """A way of running a stored stack, whose layers run in some order."""
    params = functools.partial(kernels, count=count)
    return Way(params, lambda p: rows(p, *order), run, one)


def reordered(change: Any) -> Any:
    return lambda p, h: scanned(jax.tree.map(change, p), h)


def in_twos(stack: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), stack)


def in_groups(stack: Any, h: Any) -> Any:
    """A scan over groups, in each a Python loop, as simply's."""

    def group(p: Any, h: Any) -> Any:
        for i in range(2):
            h = block(picked(p, i), h)
        return h

    return scanned(in_twos(stack), h, group)


def nested(stack: Any, h: Any) -> Any:
    return scanned(in_twos(stack), h, scanned)


def by_group_and_place(stack: Any, h: Any) -> Any:
    def step(i: Any, h: Any) -> Any:
        for j in range(2):
            h = block(jax.tree.map(lambda x, j=j: x[2 * i + j], stack), h)
        return h

    return jax.lax.fori_loop(0, 2, step, h)


def two_from(stack: Any, start: Callable[[], Any]) -> Any:
    """Each leaf computes the start anew."""
    cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=2, axis=0)
    return jax.tree.map(lambda x: cut(x, start()), stack)


def cut_in_groups(stack: Any, h: Any) -> Any:
    def step(i: Any, h: Any) -> Any:
        return scanned(two_from(stack, lambda: 2 * i), h)

    return jax.lax.fori_loop(0, 2, step, h)


def carried(stack: Any, h: Any) -> Any:
    """Each trip computes the index of the next: 0, 2, 1."""

    def step(carry: Any, _: Any) -> Any:
        i, h = carry
        return ((i + 2) % 3, block(picked(stack, i), h)), None

    return jax.lax.scan(step, (jnp.int32(0), h), None, length=3)[0][1]


def by_index(index: Any) -> Any:
    """Each leaf computes the index anew."""

    def run(stack: Any, h: Any) -> Any:
        def step(i: Any, h: Any) -> Any:
            return block(jax.tree.map(lambda x: x[index(i)], stack), h)

        return jax.lax.fori_loop(0, 3, step, h)

    return run


def by_constants(order: list[int]) -> Any:
    def run(stack: Any, h: Any) -> Any:
        return scanned(jnp.array(order), h, lambda i, h: block(picked(stack, i), h))

    return run


def by_case(layers: list[Any], h: Any) -> Any:
    """Each trip of a loop chooses its kernels by conditions on its number."""

    def step(i: Any, h: Any) -> Any:
        def chosen(*x: Any) -> Any:
            found = x[-1]
            for j in range(len(x) - 1):
                found = jnp.where(i == j, x[j], found)
            return found

        return block(jax.tree.map(chosen, *layers), h)

    return jax.lax.fori_loop(0, len(layers), step, h)


def by_branch(layers: list[Any], h: Any) -> Any:
    branches = [functools.partial(block, p) for p in layers]
    numbers = jnp.arange(len(layers))
    return scanned(numbers, h, lambda i, h: jax.lax.switch(i, branches, h))


def two_stacks(run: Any, *order: int) -> Way:
    def params(key: Any) -> Any:
        whole = kernels(key, 3)
        return {"first": picked(whole, slice(0, 2)), "last": picked(whole, slice(2, 3))}

    def layers(p: Any) -> list[Any]:
        found = rows(p["first"], 0, 1) + rows(p["last"], 0)
        return [found[i] for i in order]

    def joined(p: Any, h: Any) -> Any:
        return run(concatenated(p["first"], p["last"]), h)

    return Way(params, layers, joined, block)


def dense_then_experts() -> Way:
    """Attention of both kinds of layers is joined for one scan, the rest is not."""

    def params(key: Any) -> Any:
        stack, wide = kernels(key, 4), jax.random.normal(key, (D, D)) * 0.1
        dense = {"attention": picked(stack, slice(2)), "mlp": wide}
        experts = {"attention": picked(stack, slice(2, 4)), "up": wide}
        return {"dense": dense, "moe": experts}

    def layers(p: Any) -> list[Any]:
        return [x for part in p.values() for x in rows(part["attention"], 0, 1)]

    def run(p: Any, h: Any) -> Any:
        return scanned(concatenated(*(part["attention"] for part in p.values())), h)

    return Way(params, layers, run, block)


def changed(way: Way, change: Any) -> Way:
    """The same way with other leaves in each layer."""

    def params(key: Any) -> Any:
        p = way.params(key)
        is_apart = "block_00" in p
        return {n: change(x, key) for n, x in p.items()} if is_apart else change(p, key)

    return way._replace(params=params)


def with_biases(p: Any, key: Any) -> Any:
    made = {f"{n}_bias": jax.random.normal(key, (*p[n].shape[:-2], D)) for n in "qk"}
    return p | made


def with_gains(p: Any, key: Any) -> Any:
    means = {n: p[n].mean(-2) for n in "qk"}
    return p | {
        f"{n}_gain": 1.5 + x.reshape(*x.shape[:-1], H, N) for n, x in means.items()
    }


def with_one_key(p: Any, key: Any) -> Any:
    return p | {"k": p["k"][..., :N]}


def sharing(run: Any) -> Way:
    """Separate queries and values, and one key kernel for all layers."""

    def params(key: Any) -> Any:
        p = apart(key)
        of_each = {name: {n: x[n] for n in "qv"} for name, x in p.items()}
        return {"k": p["block_00"]["k"]} | of_each

    def layers(p: Any) -> list[Any]:
        return [x | {"k": p["k"]} for name, x in p.items() if name != "k"]

    def together(p: Any, h: Any) -> Any:
        return run([x for name, x in p.items() if name != "k"], p["k"], h)

    return Way(params, layers, together, block)


def in_patterns(layers: list[Any], h: Any) -> Any:
    """As simply does: places of a pattern are stacked over its repetitions."""
    places = [stacked(layers[i::2]) for i in range(2)]

    @jax.checkpoint
    def pattern(p: list[Any], h: Any) -> Any:
        for place in p:
            h = block(place, h)
        return h

    return scanned(places, h, pattern)


def with_keys_reversed() -> Way:
    """Query and key of one stack run in opposite orders, so layers are single."""

    def layers(p: Any) -> list[Any]:
        keys = rows(p, 2, 1, 0)
        return [x | {"k": y["k"]} for x, y in zip(rows(p, 0, 1, 2), keys, strict=True)]

    def run(p: Any, h: Any) -> Any:
        return scanned(p | {"k": p["k"][::-1]}, h)

    return Way(functools.partial(kernels, count=3), layers, run, block)


def keys_of_groups(run: Any) -> Way:
    """A key for every two layers."""

    def params(key: Any) -> Any:
        p = kernels(key, 4)
        return p | {"k": p["k"][:2]}

    def layers(p: Any) -> list[Any]:
        one = {n: p[n] for n in "qv"}
        return [x | {"k": p["k"][i // 2]} for i, x in enumerate(rows(one, 0, 1, 2, 3))]

    return Way(params, layers, run, block)


def keys_by_index(p: Any, h: Any) -> Any:
    def step(i: Any, h: Any) -> Any:
        return block({"q": p["q"][i], "v": p["v"][i], "k": p["k"][i // 2]}, h)

    return jax.lax.fori_loop(0, 4, step, h)


def with_other_leaves(split: Any, whole: Any) -> Way:
    """Layers as separate leaves of another kind, `whole` makes kernels of them."""

    def params(key: Any) -> Any:
        return {name: split(x) for name, x in apart(key).items()}

    def layers(p: Any) -> list[Any]:
        return [whole(x) for x in p.values()]

    def run(p: Any, h: Any) -> Any:
        return scanned(stacked(values(p)), h, lambda x, h: block(whole(x), h))

    return Way(params, layers, run, block)


def put_in(put: Any) -> Way:
    """Layers are put into zeros, one after the other."""

    def joined(*layers: Any) -> Any:
        found = jnp.zeros((len(layers), *layers[0].shape))
        for i, x in enumerate(layers):
            found = put(found, x, i)
        return found

    return of_leaves(lambda x, h: scanned(jax.tree.map(joined, *x), h))


def by_concatenation(layers: list[Any], h: Any) -> Any:
    return scanned(
        concatenated(*(jax.tree.map(lambda x: x[None], x) for x in layers)), h
    )


STACK = of_leaves(lambda x, h: scanned(stacked(x), h))
FLIPPED = of_stack(reordered(lambda x: x[::-1]), [2, 1, 0])
ORDER = [1, 2, 0]

WAYS: dict[str, Way] = {
    "stack": STACK,
    "many": of_leaves(lambda x, h: scanned(stacked(x), h), 15),
    "concatenate": of_leaves(by_concatenation),
    "set": put_in(lambda found, x, i: found.at[i].set(x)),
    "updated": put_in(
        lambda found, x, i: jax.lax.dynamic_update_index_in_dim(found, x, i, 0)
    ),
    "reversed leaves": of_leaves(
        lambda x, h: scanned(stacked(x[::-1]), h, reverse=True)
    ),
    "unroll": of_leaves(lambda x, h: scanned(stacked(x), h, unroll=2)),
    "remat": of_leaves(lambda x, h: scanned(stacked(x), h, jax.checkpoint(block))),
    "map": of_leaves(
        lambda x, h: jax.lax.map(lambda p: block(p, h), stacked(x)).sum(0)
    ),
    "vmap": of_leaves(lambda x, h: jax.vmap(lambda p: block(p, h))(stacked(x)).sum(0)),
    "case": of_leaves(by_case),
    "branch": of_leaves(by_branch),
    "groups": of_leaves(lambda x, h: in_groups(stacked(x), h), 4),
    "nested scans": of_leaves(lambda x, h: nested(stacked(x), h), 4),
    "index of leaves": of_leaves(lambda x, h: by_index(lambda i: i)(stacked(x), h)),
    "joined stacks": two_stacks(scanned, 0, 1, 2),
    "joined stacks reversed": two_stacks(
        lambda p, h: scanned(p, h, reverse=True), 2, 1, 0
    ),
    "dense then experts": dense_then_experts(),
    "flipped": FLIPPED,
    "rolled": of_stack(reordered(lambda x: jnp.roll(x, 1, 0)), [2, 0, 1]),
    "permuted": of_stack(reordered(lambda x: x[jnp.array(ORDER)]), ORDER),
    "taken": of_stack(
        reordered(lambda x: jnp.take(x, jnp.array(ORDER), axis=0)), ORDER
    ),
    "stored stack in groups": of_stack(in_groups, [0, 1, 2, 3], 4),
    "stored stack in nested scans": of_stack(nested, [0, 1, 2, 3], 4),
    "group and place": of_stack(by_group_and_place, [0, 1, 2, 3], 4),
    "cut in groups": of_stack(cut_in_groups, [0, 1, 2, 3], 4),
    "two halves": of_stack(
        lambda p, h: scanned(picked(p, slice(2, 4)), scanned(picked(p, slice(2)), h)),
        [0, 1, 2, 3],
        4,
    ),
    "index": of_stack(by_index(lambda i: i), [0, 1, 2]),
    "index from the end": of_stack(by_index(lambda i: 2 - i), [2, 1, 0]),
    "index modulo": of_stack(by_index(lambda i: (2 * i + 1) % 3), [1, 0, 2]),
    "index that is carried": of_stack(carried, [0, 2, 1]),
    "index by constants": of_stack(by_constants([1, 0, 2]), [1, 0, 2]),
    "shared key": sharing(
        lambda x, k, h: scanned(stacked(x), h, lambda p, h: block(p | {"k": k}, h))
    ),
    "shared key under vmap": sharing(
        lambda x, k, h: jax.vmap(lambda p: block(p | {"k": k}, h))(stacked(x)).sum(0)
    ),
    "patterns": of_leaves(in_patterns, 4),
    "keys reversed": with_keys_reversed(),
    "keys of groups": keys_of_groups(keys_by_index),
    "keys repeated": keys_of_groups(
        lambda p, h: scanned(p | {"k": jnp.repeat(p["k"], 2, 0)}, h)
    ),
    "fused": with_other_leaves(
        lambda x: {"qkv": jnp.concatenate([x[n] for n in "qkv"], -1)},
        lambda x: dict(zip("qkv", jnp.split(x["qkv"], 3, -1), strict=True)),
    ),
    "heads of two kernels": with_other_leaves(
        lambda x: x | {"q": x["q"][:, :N], "other": x["q"][:, N:]},
        lambda x: x | {"q": jnp.concatenate([x["q"], x["other"]], -1)},
    ),
    "adapters": with_other_leaves(
        lambda x: x | {"a": x["q"][:, :2] * 0.3, "b": x["k"][:2] * 0.5},
        lambda x: x | {"q": x["q"] + x["a"] @ x["b"]},
    ),
    "biases": changed(STACK, with_biases),
    "gains": changed(STACK, with_gains),
    "gains of flipped": changed(FLIPPED, with_gains),
    "grouped queries": changed(STACK, with_one_key),
}


def largest(way: Way, params: Any, inputs: list[Any]) -> np.ndarray:
    """Returns the largest logit of each layer and head, on given inputs."""
    pairs = zip(way.layers(params), inputs, strict=True)
    return np.stack([logits(p, h).max((0, 2, 3)) for p, h in pairs])


def inputs_of(name: str, way: Way, params: Any, h: Any) -> list[Any]:
    found = []
    for p in way.layers(params):
        found.append(h)
        h = h if "map" in name else way.block(p, h)
    return found


#: Cheap ways of each kind: orders, joins, loops, indices, and shared leaves.
EVERY_DAY = [name for name in list(WAYS)[1::2] if name not in ("many layers", "groups")]


@pytest.mark.parametrize("name", few(WAYS, *EVERY_DAY))
def test_each_layer_and_head_has_its_number_and_its_clip(name: str):
    way, x = WAYS[name], jax.random.normal(jax.random.key(1), (B, T, D))
    params = way.params(jax.random.key(0))

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(way.run(p, x) ** 2)

    reading = mc.read_model(loss, params, x)
    assert not reading.refused
    inputs = inputs_of(name, way, params, x)
    before = largest(way, params, inputs)
    _, stats = jax.jit(mc.record_attention(loss))(params, x)
    recorded = np.concatenate([x.ravel() for x in jax.tree.leaves(stats)])
    np.testing.assert_allclose(np.sort(recorded), np.sort(before.ravel()), rtol=1e-5)
    # Half of the heads are clipped, whole layers are not.
    tau = float(np.median(before))
    clipped = mc.clip_qk(params, stats, threshold=tau, model=reading)
    after = largest(way, clipped, inputs)
    np.testing.assert_allclose(after, np.minimum(before, tau), rtol=1e-4)
    under = before <= tau
    np.testing.assert_array_equal(after[under], before[under])
    assert under.any() and not under.all()


def read(name: str) -> mc.ModelReading:
    params = jax.eval_shape(WAYS[name].params, jax.random.key(0))
    x = jnp.ones((B, T, D))
    return mc.read_model(lambda p, x: WAYS[name].run(p, x).mean(), params, x)


def test_labels_and_axes_are_those_of_the_layers():
    for name, axes in {
        "stack": (0, 1),
        "vmap": (0, 1),
        "joined stacks": (1, 2),
    }.items():
        reading = read(name)
        assert {*jax.tree.leaves(reading.labels)} == {"matrix"}
        numbers = jax.tree.leaves(reading.dimension_numbers, is_leaf=is_numbers)
        assert {(x.reduction_axis, x.output_axis) for x in numbers} == {axes}


def test_each_layer_has_a_path_that_says_which_it_is():
    def paths(name: str) -> list[str]:
        return sorted(layer.path for layer in read(name).attention)

    assert paths("groups") == [f"block_0{i}" for i in range(4)]
    assert paths("joined stacks") == ["first", "last"]
    assert paths("flipped") == [""]
    assert paths("two halves") == [f"q/{i}" for i in range(4)]


@pytest.mark.parametrize(
    ("frozen", "trained", "shape"),
    [more("first", "last", (H,)), ("last", "first", (2, H))],
)
def test_frozen_layers_have_no_number(frozen, trained, shape):
    """Also those whose inputs are trained, as of a language model after an encoder."""
    way = WAYS["joined stacks"]
    params, x = way.params(jax.random.key(0)), jnp.ones((B, T, D))

    def loss(p: Any, x: Any) -> Any:
        return way.run({**p, frozen: jax.lax.stop_gradient(p[frozen])}, x).mean()

    _, stats = mc.record_attention(loss)(params, x)
    assert jax.tree.map(jnp.shape, stats) == {trained: {"max_logits": shape}}
    reading = mc.read_model(loss, params, x)
    assert not reading.refused
    assert [where.partition(" at ")[0] for where in reading.not_clipped] == [frozen]
    clipped = mc.clip_qk(params, stats, threshold=1e-6, model=reading)
    differs = jax.tree.map(lambda a, b: bool((a != b).any()), clipped, params)
    assert {name for name in params if any(jax.tree.leaves(differs[name]))} == {trained}


def test_layers_that_cannot_be_told_apart_are_refused():
    stack, x = kernels(jax.random.key(0), 3), jnp.ones((B, T, D))

    def in_an_unknown_order(p: Any, x: Any) -> Any:
        return scanned(picked(p, jnp.argsort(x[0, :3, 0])), x).sum()

    def unknown_groups(p: Any, x: Any) -> Any:
        def step(i: Any, h: Any) -> Any:
            start = (x[0, 0, 0] > i).astype(int)
            return scanned(two_from(p, lambda: start), h)

        return jax.lax.fori_loop(0, 2, step, x).sum()

    def until(p: Any, x: Any) -> Any:
        def step(state: Any) -> Any:
            i, h = state
            return i + 1, block(picked(p, i), h)

        return jax.lax.while_loop(lambda s: s[1].max() > 0, step, (0, x))[1].sum()

    of_an_index = "an index that is not a loop counter picks a layer of 'q'"
    for loss, why in {
        **dict.fromkeys([in_an_unknown_order, unknown_groups], of_an_index),
        until: "jax.lax.while_loop goes through layers, and how often is not known",
    }.items():
        reading = mc.read_model(loss, stack, x)
        assert not reading.attention
        (refused,) = reading.refused
        assert "test_layers_put_together.py:" in refused and why in refused
        with pytest.raises(ValueError, match="cannot scale the logits"):
            mc.muonclip(1e-2, model=reading)


@pytest.mark.more
def test_blocks_of_nnx_that_are_stacked_when_they_run():
    class Model(nnx.Module):
        def __init__(self, rngs: Any):
            for i in range(3):
                attention = nnx.MultiHeadAttention(H, D, rngs=rngs, decode=False)
                setattr(self, f"block{i}", attention)

        def __call__(self, x: Any) -> Any:
            for i in range(3):
                x = x + getattr(self, f"block{i}")(x)
            return x

    def stacked_run(model: Any, x: Any) -> Any:
        parts = [nnx.split(getattr(model, f"block{i}")) for i in range(3)]
        graph, states = parts[0][0], [state for _, state in parts]

        def step(x: Any, state: Any) -> Any:
            return x + nnx.merge(graph, state)(x), None

        stack = jax.tree.map(lambda *x: jnp.stack(x), *states)
        return jnp.mean(jax.lax.scan(step, x, stack)[0] ** 2)

    model, x = Model(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (B, T, D))
    _, stats = mc.record_attention(stacked_run)(model, x)
    _, expected = mc.record_attention(lambda m, x: jnp.mean(m(x) ** 2))(model, x)
    assert [*stats] == [*expected] == ["block0", "block1", "block2"]
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5), stats, expected
    )
