"""The clip scales what query and key make; a bias that neither enters stays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import are_unlike, differ, few, first_that, more, normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import muonclip_jax as mc


B, T, D, H, DIM = 2, 8, 12, 3, 4
X, PAIRS = normal(1, B, T, D), normal(2, B, T, T, 5)
CAUSAL = np.tri(T, dtype=bool)
FAR = np.arange(T)[:, None] - np.arange(T) + T - 1


def draw(seed):
    return {name: normal((seed, i), D, D, scale=0.7) for i, name in enumerate("qkvo")}


def heads(p, x):
    return ((x @ p[name]).reshape(*x.shape[:-1], H, DIM) for name in "qkv")


def largest(p, mask=True):
    """The largest logits that query and key make, in float64."""
    as_numbers = {name: np.asarray(p[name], np.float64) for name in "qkv"}
    q, k, _ = heads(as_numbers, np.asarray(X, np.float64))
    logits = np.einsum("bthd,bshd->bhts", q, k) / DIM**0.5
    return np.where(mask, logits, -np.inf).max((0, 2, 3))


def distinguishes(p):
    """Whether the mask hides the largest logit of every head, and heads differ."""
    seen = largest(p, CAUSAL)
    return differ(seen, largest(p)) and are_unlike(seen) and are_unlike(largest(p))


PARAMS = first_that(distinguishes, draw) | {
    "table": normal(5, 2 * T - 1, H, scale=90),
    "pair": normal(6, 5, H, scale=60),
    "forget": normal(7, D, H),
    "cap": jnp.asarray(5.0),
}


def attention(added):
    """A loss by what `added(params, logits)` makes of the logits."""

    def loss(p, x):
        q, k, v = heads(p, x)
        logits = jnp.einsum("bthd,bshd->bhts", q, k) / DIM**0.5
        weights = jax.nn.softmax(added(p, logits))
        out = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)
        return jnp.mean(jnp.sin(out @ p["o"]) ** 2)

    return loss


@functools.partial(jax.jit, static_argnums=0)
def biased(added, mask):
    """The largest logits that enter the softmax."""
    q, k, _ = heads(PARAMS, X)
    logits = added(PARAMS, jnp.einsum("bthd,bshd->bhts", q, k) / DIM**0.5)
    return jnp.where(mask, logits, -jnp.inf).max((0, 2, 3))


def table(p):
    return jnp.moveaxis(p["table"][FAR], -1, 0)


def hides(number, dtype="float32"):
    return jnp.where(CAUSAL, 0, jnp.asarray(number, dtype)).astype(jnp.float32)


def forgets(p, logits):
    kept = jnp.cumsum(jax.nn.log_sigmoid(X @ p["forget"]), 1).swapaxes(1, 2)
    logits = logits + kept[..., None] - kept[:, :, None]
    return jnp.where(CAUSAL, logits, -1e9)


def windows_of_swin(p, logits):
    """Shifted windows add -100, which hides nothing."""
    return logits + table(p) + jnp.where(FAR > T, -100.0, 0.0)


def slopes(p, logits):
    rates = 50.0 ** -jnp.arange(-1, H - 1)[:, None, None]
    return jnp.where(CAUSAL, logits + rates * (FAR + 1), -jnp.inf)


BIASES = {
    "T5": (lambda p, s: s + table(p), True),
    "ALiBi": (slopes, CAUSAL),
    "Swin": (windows_of_swin, True),
    "AlphaFold": (lambda p, s: s + jnp.moveaxis(PAIRS @ p["pair"], -1, 1), True),
    "FoX": (forgets, CAUSAL),
    "-1e4 in bfloat16": (lambda p, s: s + table(p) + hides(-1e4, "bfloat16"), CAUSAL),
    "one array": (lambda p, s: s + (table(p) / 9 + hides(-1e4)), CAUSAL),
    "finfo": (lambda p, s: table(p) + s + hides(jnp.finfo("float32").min), CAUSAL),
    "-inf": (lambda p, s: s + table(p) + hides(-jnp.inf), CAUSAL),
    "subtracted": (lambda p, s: s - (table(p) + 2e4 * ~CAUSAL), CAUSAL),
    "a number": (lambda p, s: s - 2e4 + table(p), True),
    "cap": (lambda p, s: p["cap"] * jnp.tanh(s / p["cap"]) + hides(-1e4), CAUSAL),
    "under a cap": (lambda p, s: 5 * jnp.tanh((s + table(p)) / 5), True),
    "scaled": (lambda p, s: (2 * s + table(p)) / 2, True),
}


@pytest.mark.parametrize("name", few(list(BIASES), "T5", "FoX", "subtracted"))
def test_a_head_is_clipped_by_what_query_and_key_make(name):
    added, mask = BIASES[name]
    loss = attention(added)
    recorded = jax.value_and_grad(mc.record_attention(loss), has_aux=True)
    (value, stats), grads = jax.jit(recorded)(PARAMS, X)
    before = largest(PARAMS, mask)
    assert differ(before, biased(added, mask))
    np.testing.assert_allclose(stats["max_logits"], before, rtol=1e-5)
    expected = jax.jit(jax.value_and_grad(loss))(PARAMS, X)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, (value, grads), expected)
    reading = mc.read_model(loss, PARAMS, X)
    tau = float(np.median(before)) / 2
    clipped = mc.clip_qk(PARAMS, stats, tau, model=reading)
    after = largest(clipped, mask)
    np.testing.assert_allclose(after, np.minimum(before, tau), rtol=1e-4)


@pytest.mark.parametrize("name", ["T5", more("AlphaFold"), more("Swin")])
def test_clipped_often_a_head_stays_alive(name):
    """A bias above the threshold wore it away before."""
    loss = attention(BIASES[name][0])
    reading = mc.read_model(loss, PARAMS, X)

    def clip(_, p):
        return mc.clip_qk(p, mc.record_attention(loss)(p, X)[1], 2.0, model=reading)

    once = jax.jit(clip)(0, PARAMS)
    last = jax.jit(lambda p: jax.lax.fori_loop(0, 60, clip, p))(once)
    assert np.any(once["q"] != PARAMS["q"])
    np.testing.assert_allclose(last["q"], once["q"], rtol=1e-4)


def test_the_table_names_the_one_kernel_that_makes_a_bias():
    """The bias contains two leaves; its kernel is the first leaf of the params."""

    def loss(p, x):
        hidden = jnp.tanh(x @ p["into"])
        kept = jnp.cumsum(hidden @ p["a gate"], 1).swapaxes(1, 2)
        return attention(lambda p, s: s + kept[..., None] - kept[:, :, None])(p, hidden)

    names = {"a gate": PARAMS["forget"], "into": normal(8, D, D)}
    params = names | {name: PARAMS[name] for name in "qkvo"}
    assert "stays: a gate" in str(mc.read_model(loss, params, X))


ROWS, WIDTH = 3, 5
SEEN = np.arange(T) < np.array([[5], [4]])  # residues of each protein


def draw_evoformer(seed):
    params = {
        n: normal((seed, i), 2, D, H, DIM, scale=0.7) for i, n in enumerate("qkvg")
    }
    return params | {
        "o": normal((seed, 5), 2, H, DIM, D, scale=0.1),
        "pair": normal((seed, 6), 2, WIDTH, H, scale=60),
    }


def row_attention(p, x, pairs):
    """AlphaFold's (doi:10.1038/s41586-021-03819-2, algorithm 7), and its logits."""
    q, k, v, gate = (jnp.einsum("bsrc,chd->bsrhd", x, p[n]) for n in "qkvg")
    logits = jnp.einsum("bsqhd,bskhd->bshqk", q * DIM**-0.5, k)
    biased = logits + 1e9 * (SEEN[:, None, None, None] - 1.0)
    biased = biased + jnp.einsum("bqkc,ch->bhqk", pairs, p["pair"])[:, None]
    out = jnp.einsum("bshqk,bskhd->bsqhd", jax.nn.softmax(biased), v)
    return x + jnp.einsum("bsqhd,hdc->bsqc", jax.nn.sigmoid(gate) * out, p["o"]), logits


def test_row_attention_with_a_bias_of_pairs():
    msa = normal(8, B, ROWS, T, D)

    def loss(p, x):
        block = jax.checkpoint(lambda x, p: (row_attention(p, x, PAIRS)[0], None))
        return jnp.mean(jnp.sin(jax.lax.scan(block, x, p)[0]))

    @jax.jit
    def exact(p, seen=SEEN):
        def block(x, p):
            x, logits = row_attention(p, x, PAIRS)
            shown = jnp.where(seen[:, None, None, None], logits, -jnp.inf)
            return x, shown.max((0, 1, 3, 4))

        return jax.lax.scan(block, msa, p)[1]

    def distinguishes(p):
        return differ(exact(p), exact(p, np.ones_like(SEEN)))

    params = first_that(distinguishes, draw_evoformer)
    reading = mc.read_model(loss, params, msa)
    stats = jax.jit(lambda p: mc.record_attention(loss)(p, msa)[1])(params)
    before = exact(params)
    np.testing.assert_allclose(stats["max_logits"], before, rtol=1e-5)
    tau = float(np.median(before[0]))
    after = exact(mc.clip_qk(params, stats, tau, model=reading))
    # The second layer's input changes with the first.
    np.testing.assert_allclose(after[0], np.minimum(before[0], tau), rtol=1e-4)


def masked(p):
    """A bias and a mask in one array."""
    return table(p) + hides(-2e4)


def over_heads(p, s):
    pairs = jnp.moveaxis(s, 1, 0), masked(p)
    return jnp.moveaxis(jax.lax.map(lambda x: x[0] + x[1], pairs), 0, 1)


def over_queries(p, s):
    def fill(i, done):
        row = jax.lax.dynamic_index_in_dim(s, i, 2) + masked(p)[:, i][:, None]
        return jax.lax.dynamic_update_slice_in_dim(done, row, i, 2)

    return jax.lax.fori_loop(0, T, fill, jnp.zeros_like(s))


def until(p, s):
    def more(state):
        return state[0] + masked(p), state[1] + 1

    return jax.lax.while_loop(lambda state: state[1] < 2, more, (s, 0))[0]


def on_devices(p, s):
    mesh = jax.make_mesh((1,), ("h",), axis_types=(AxisType.Auto,))
    specs = P(None, "h"), P("h")
    add = jax.shard_map(
        lambda a, b: a + b, mesh=mesh, in_specs=specs, out_specs=specs[0]
    )
    return add(s, masked(p))


@jax.custom_vjp
def sum_of(s, b):
    return s + b


sum_of.defvjp(lambda s, b: (s + b, None), lambda _, g: (g, g.sum(0)))

PLACES = {
    "jit": lambda p, s: jax.jit(jnp.add)(s, masked(p)),
    "remat": lambda p, s: jax.checkpoint(lambda s, b: s + b)(s, masked(p)),
    "custom_vjp": lambda p, s: sum_of(s, masked(p)),
    "cond": lambda p, s: jax.lax.cond(
        jnp.sum(s) < 1e9, lambda s: s + masked(p), lambda s: s, s
    ),
    "scan": lambda p, s: jax.lax.scan(
        lambda s, share: (s + share * masked(p), None), s, jnp.arange(3.0)
    )[0],
    "map": over_heads,
    "fori_loop": over_queries,
    "while_loop": until,
    "shard_map": on_devices,
    "vmap": lambda p, s: jax.vmap(jnp.add, (1, 0), 1)(s, masked(p)),
}


@pytest.mark.parametrize("place", few(list(PLACES), "scan", "fori_loop", "cond"))
def test_wherever_a_bias_is_added(place):
    loss = attention(PLACES[place])
    value, stats = jax.jit(mc.record_attention(loss))(PARAMS, X)
    expected = largest(PARAMS, CAUSAL)
    np.testing.assert_allclose(stats["max_logits"], expected, rtol=1e-5)
    np.testing.assert_allclose(value, loss(PARAMS, X), rtol=1e-5)


BY_KERNELS = {
    "jax.nn": lambda *x, **o: jax.nn.dot_product_attention(*x, **o),
    "blockwise": lambda *x, **o: mc.blockwise_attention(*x, block_size=4, **o)[0],
}


@pytest.mark.parametrize("kernel", BY_KERNELS)
def test_functions_with_a_bias_among_their_arguments(kernel):
    bias = masked(PARAMS)[None]

    def loss(p, x):
        return jnp.sum(BY_KERNELS[kernel](*heads(p, x), bias=bias) ** 2)

    _, stats = jax.jit(mc.record_attention(loss))(PARAMS, X)
    np.testing.assert_allclose(stats["max_logits"], largest(PARAMS, CAUSAL), rtol=1e-5)


@pytest.mark.parametrize("number", [-1e4, -jnp.inf, float(jnp.finfo("bfloat16").min)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_mask_that_is_added_hides_its_pairs(number, dtype):
    query, key, _ = heads(PARAMS, X)
    bias = hides(number).astype(dtype)
    expected = largest(PARAMS, CAUSAL)
    for found in (
        mc.max_logits(query, key, bias=bias),
        mc.blockwise_attention(query, key, key, bias=bias, block_size=4)[1],
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    alike = mc.max_logits(query, key, bias=jnp.asarray(-2e4, dtype))
    np.testing.assert_allclose(alike, largest(PARAMS), rtol=1e-5)


def row_of_the_bias(loss, params):
    """Of the table that a reading prints."""
    rows = str(mc.read_model(loss, params, X)).splitlines()
    (row,) = [row for row in rows if "the bias" in row]
    return row


def test_the_table_names_the_bias():
    loss = attention(lambda p, s: s + table(p))
    row = row_of_the_bias(loss, PARAMS)
    line = test_the_table_names_the_bias.__code__.co_firstlineno + 1
    assert row.endswith(f"key k; the bias at test_biases.py:{line} stays: table")


def test_layers_name_their_own_biases():
    """Rows of layers that are alike are one row."""

    def loss(p, x):
        for layer in p["layers"]:
            x = x + attention(lambda p, s: s + table(p))(layer, x)
        return jnp.sum(x)

    row = row_of_the_bias(loss, {"layers": [PARAMS, PARAMS]})
    assert row.startswith("layers/0-1") and row.endswith("stays: table")
