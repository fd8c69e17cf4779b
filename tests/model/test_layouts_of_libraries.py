"""QK-Clip on the layouts of other libraries: the next logits are `min(S, tau)`.

Each is read from a function with the library's own names and axes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import more, normal

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("every_container")


D, H, K, E, L, T = 12, 4, 2, 6, 3, 5  # features, heads, key heads, head_dim, layers
X = np.asarray(normal(0, T, D), np.float64)


@dataclasses.dataclass
class Layout:
    """Params, the module of the statistics, and query and key of one layer."""

    params: dict
    module: tuple
    query: str  # einsum of its kernel
    key: str
    leaves: object  # (attention module) -> query, query bias, key, key bias
    stacked: int | None = None


def rand(*shape):
    return normal(shape, *shape)


def project(x, kernel, bias, equation, heads):
    kernel = np.asarray(kernel, np.float64)
    y = np.einsum(equation, x, kernel).reshape(T, heads, E)
    return y if bias is None else y + np.asarray(bias, np.float64).reshape(heads, E)


def logits(layout, params):
    """The largest logit of each head: `(heads,)`, or `(layers, heads)`."""
    module = params
    for name in layout.module:
        module = module[name]
    stacks = [None] if layout.stacked is None else range(L)
    rows = []
    for i in stacks:
        query, query_bias, key, key_bias = (
            leaf if leaf is None or i is None else jnp.take(leaf, i, layout.stacked)
            for leaf in layout.leaves(module)
        )
        heads = query.size // D // E
        q = project(X, query, query_bias, layout.query, heads)
        k = project(X, key, key_bias, layout.key, key.size // D // E)
        k = np.repeat(k, heads // k.shape[1], 1)
        rows.append(np.einsum("qhe,khe->hqk", q, k).max((1, 2)))
    return np.array(rows[0] if layout.stacked is None else rows)


def run(layout, params, x):
    """Attention of all layers, scanned where they are stacked."""

    def attend(leaves):
        query, query_bias, key, key_bias = leaves

        def heads(kernel, bias, equation):
            y = jnp.einsum(equation, x, kernel).reshape(T, -1, E)
            return y if bias is None else y + bias.reshape(-1, E)

        q, k = heads(query, query_bias, layout.query), heads(key, key_bias, layout.key)
        k = jnp.repeat(k, q.shape[1] // k.shape[1], 1)
        weights = jax.nn.softmax(jnp.einsum("qhe,khe->hqk", q, k))
        return jnp.einsum("hqk,khe->qhe", weights, k)

    for name in layout.module:
        params = params[name]
    leaves = layout.leaves(params)
    if layout.stacked is None:
        return attend(leaves)
    return jax.lax.map(
        attend, jax.tree.map(lambda x: jnp.moveaxis(x, layout.stacked, 0), leaves)
    )


@functools.cache
def read(name):
    layout = LAYOUTS[name]
    fun, x = functools.partial(run, layout), jnp.asarray(X, jnp.float32)
    reading = mc.read_model(fun, layout.params, x)
    _, stats = mc.record_attention(fun)(layout.params, x)
    return reading, stats


def flax_like(query, key, out, leaf="kernel"):
    def build(*lead, axis=0):
        def kernel(*sizes):
            return {leaf: rand(*sizes[:axis], *lead, *sizes[axis:])}

        value = "value" if key == "key" else "v_proj"
        inputs = {query: kernel(D, H, E), key: kernel(D, K, E), value: kernel(D, K, E)}
        return inputs | {out: kernel(H, E, D)}

    return build


def of(query, key, leaf, bias=None):
    def leaves(module):
        return (
            module[query][leaf],
            module[query].get(bias),
            module[key][leaf],
            module[key].get(bias),
        )

    return leaves


def dense(*shape, bias=None, leaf="kernel", bias_leaf="bias"):
    return {leaf: rand(*shape)} | ({bias_leaf: rand(*bias)} if bias else {})


LAYOUTS = {
    "bonsai": Layout(
        {"layers": {"0": {"attn": flax_like("q_proj", "k_proj", "o_proj")()}}},
        ("layers", "0", "attn"), "td,dhe->the", "td,dhe->the",
        of("q_proj", "k_proj", "kernel"),
    ),
    "tunix, with biases": Layout(
        {"attn": flax_like("q_proj", "k_proj", "o_proj", leaf="w")()
         | {"q_bias": rand(H * E), "k_bias": rand(K * E), "v_bias": rand(K * E)}},
        ("attn",), "td,dhe->the", "td,dhe->the",
        lambda m: (m["q_proj"]["w"], m["q_bias"], m["k_proj"]["w"], m["k_bias"]),
    ),
    "arrays": Layout(
        {"attn": {"wq": rand(D, H, E), "wk": rand(D, K, E), "wv": rand(D, K, E),
                  "wo": rand(H, E, D)}},
        ("attn",), "td,dhe->the", "td,dhe->the",
        lambda m: (m["wq"], None, m["wk"], None),
    ),
    "MaxText, scanned": Layout(
        {"decoder": {"layers": {
            "norm": {"scale": rand(D, L)},
            "attn": flax_like("query", "key", "out")(L, axis=1),
        }}},
        ("decoder", "layers", "attn"), "td,dhe->the", "td,dhe->the",
        of("query", "key", "kernel"), stacked=1,
    ),
    "HuggingFace": Layout(
        {"self_attn": {name: dense(D, n * E, bias=(n * E,)) for name, n in
                       (("q_proj", H), ("k_proj", K), ("v_proj", K))}
         | {"o_proj": dense(H * E, D)}},
        ("self_attn",), "td,dh->th", "td,dh->th",
        of("q_proj", "k_proj", "kernel", "bias"),
    ),
    "Haiku": Layout(
        {"multi_head_attention": {
            name: dense(D, H * E, bias=(H * E,), leaf="w", bias_leaf="b")
            for name in ("query", "key", "value")}},
        ("multi_head_attention",), "td,dh->th", "td,dh->th",
        of("query", "key", "w", "b"),
    ),
    "Equinox": Layout(
        {"attention": {name: dense(H * E, D, leaf="weight")
                       for name in ("query_proj", "key_proj", "value_proj")}
         | {"output_proj": dense(D, H * E, leaf="weight")}},
        ("attention",), "td,hd->th", "td,hd->th",
        of("query_proj", "key_proj", "weight"),
    ),
    "Equinox, stacked by filter_vmap": Layout(
        {"norm": {"weight": rand(L, D)},
         "attention": {name: dense(L, H * E, D, bias=(L, H * E), leaf="weight")
                       for name in ("query_proj", "key_proj", "value_proj")}},
        ("attention",), "td,hd->th", "td,hd->th",
        of("query_proj", "key_proj", "weight", "bias"), stacked=0,
    ),
    "Haliax, queries in groups": Layout(
        {"stacked": {
            "norm": {"weight": {"array": rand(L, D)}},
            "attn": {
                "q_proj": {"weight": {"array": rand(L, K, H // K, E, D)},
                           "bias": {"array": rand(L, K, H // K, E)}},
                "k_proj": {"weight": {"array": rand(L, K, E, D)},
                           "bias": {"array": rand(L, K, E)}},
                "v_proj": {"weight": {"array": rand(L, K, E, D)}},
                "o_proj": {"weight": {"array": rand(L, D, H, E)}},
            }}},
        ("stacked", "attn"), "td,kged->tkge", "td,ked->tke",
        lambda m: tuple(m[p][leaf]["array"] for p in ("q_proj", "k_proj")
                        for leaf in ("weight", "bias")), stacked=0,
    ),
    "Gemma": Layout(
        {"attn": {"q_einsum": {"w": rand(H, D, E)},
                  "kv_einsum": {"w": rand(2, K, D, E)},
                  "attn_vec_einsum": {"w": rand(H, E, D)}}},
        ("attn",), "td,hde->the", "td,hde->the",
        lambda m: (m["q_einsum"]["w"], None, m["kv_einsum"]["w"][0], None),
    ),
    "Gemma, one einsum": Layout(
        {"attn": {"qkv_einsum": {"w": rand(3, H, D, E)},
                  "attn_vec_einsum": {"w": rand(H, E, D)}}},
        ("attn",), "td,hde->the", "td,hde->the",
        lambda m: (m["qkv_einsum"]["w"][0], None, m["qkv_einsum"]["w"][1], None),
    ),
    "Bloom": Layout(
        {"attn": {"query_key_value": dense(D, 3 * H * E, bias=(3 * H * E,))}},
        ("attn",), "td,dh->th", "td,dh->th",
        lambda m: tuple(x.reshape((*x.shape[:-2], -1)) for i in (0, 1) for x in (
            m["query_key_value"]["kernel"].reshape(D, H, 3, E)[:, :, i],
            m["query_key_value"]["bias"].reshape(H, 3, E)[:, i])),
    ),
    "Bloom, turned": Layout(
        {"attn": {"query_key_value": dense(3 * H * E, D, bias=(3 * H * E,))}},
        ("attn",), "td,hd->th", "td,hd->th",
        lambda m: tuple(x for i in (0, 1) for x in (
            m["query_key_value"]["kernel"].reshape(H, 3, E, D)[:, i].reshape(-1, D),
            m["query_key_value"]["bias"].reshape(H, 3, E)[:, i].reshape(-1))),
    ),
    "GPT-2 of HuggingFace, turned": Layout(
        {"attn": {"c_attn": dense(3 * H * E, D, bias=(3 * H * E,))}},
        ("attn",), "td,hd->th", "td,hd->th",
        lambda m: tuple(x for i in (0, 1) for x in (
            m["c_attn"]["kernel"].reshape(3, -1, D)[i],
            m["c_attn"]["bias"].reshape(3, -1)[i])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("alpha", [0.5, more(0.2)])
def test_next_logits_are_at_most_the_threshold(name, alpha):
    layout, (reading, stats) = LAYOUTS[name], read(name)
    before = logits(layout, layout.params)
    (seen,) = jax.tree.leaves(stats)
    np.testing.assert_allclose(seen, before, rtol=1e-5)
    tau = float(np.median(before))
    after = mc.clip_qk(layout.params, stats, tau, alpha=alpha, model=reading)
    np.testing.assert_allclose(
        logits(layout, after), np.minimum(before, tau), rtol=1e-4
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_else_is_scaled(name):
    layout, (reading, stats) = LAYOUTS[name], read(name)
    before = logits(layout, layout.params)
    tau = float(before.min()) / 2
    if tau <= 0:
        pytest.fail("draw other numbers: a head has no positive logit")
    after = mc.clip_qk(layout.params, stats, tau, model=reading)
    options = {"attention": reading.attention, "dimension_numbers": lambda p: None}
    rows = mc.describe(layout.params, collapse=False, **options).splitlines()[1:]
    queries, keys = (
        {row.split()[0] for row in rows if f"{role}," in row}
        for role in ("query", "key")
    )
    pairs = jax.tree.leaves_with_path(layout.params), jax.tree.leaves(after)
    for (path, old), new in zip(*pairs, strict=True):
        key = "/".join(str(k.key) for k in path).removesuffix("/array")
        changed = bool((old != new).any())
        assert changed if key in queries else key in keys or not changed, key
