"""Attention that is hard to read: softmaxes, and what is done to query and key."""

import jax
import jax.numpy as jnp
import numpy as np
from by_numbers import noted
from pieces_of_cases import (
    array, B, C, case, cut, D, end, gains, H, K, MEMORY, mixed, one, qkv, rms, SAYS,
    scores, soft, T, unit, X,
)  # fmt: skip


DISTANCE = np.arange(T)[:, None] - np.arange(T) + T - 1
CAUSAL = np.tril(np.ones((T, T), bool))


# Softmaxes.


@case(SAYS, one(), X, attention="read")
def plain(p, x):
    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(SAYS, one(), X, attention="read")
def base_two(p, x):
    q, k, v = qkv(p, x)
    logits = noted(scores(q, k) * np.log2(np.e), unit=np.log(2))
    e = jnp.exp2(logits - logits.max(-1, keepdims=True))
    return end(p, x, mixed(e / e.sum(-1, keepdims=True), v))


@case(SAYS, one(), X, attention="read")
def base_two_without_a_factor(p, x):
    q, k, v = qkv(p, x)
    e = jnp.exp2(noted(scores(q, k), unit=np.log(2)))
    return end(p, x, mixed(e / e.sum(-1, keepdims=True), v))


@case(SAYS, one(), X, attention="read")
def base_two_by_power(p, x):
    q, k, v = qkv(p, x)
    e = jnp.power(2.0, noted(scores(q, k), unit=np.log(2)))
    return end(p, x, mixed(e / e.sum(-1, keepdims=True), v))


@case(SAYS, one(), X, attention="read")
def by_logsumexp(p, x):
    q, k, v = qkv(p, x)
    logits = noted(scores(q, k))
    w = jnp.exp(logits - jax.nn.logsumexp(logits, -1, keepdims=True))
    return end(p, x, mixed(w, v))


@case(SAYS, one(), X, attention="read")
def by_log_softmax(p, x):
    q, k, v = qkv(p, x)
    w = jnp.exp(jax.nn.log_softmax(noted(scores(q, k))))
    return end(p, x, mixed(w, v))


@case(SAYS, one(), X, attention="read")
def without_a_maximum(p, x):
    q, k, v = qkv(p, x)
    e = jnp.exp(noted(scores(q, k)))
    return end(p, x, mixed(e / e.sum(-1, keepdims=True), v))


@case(SAYS, one(), X, attention="read")
def divided_after_the_values(p, x):
    q, k, v = qkv(p, x)
    logits = noted(scores(q, k))
    e = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    total = jnp.einsum("bhqk->bqh", e)[..., None]
    y = jnp.einsum("bhqk,bkhd->bqhd", e, v) / total
    return end(p, x, y.reshape(B, T, D))


@case(SAYS, one(), X, attention="read")
def times_the_reciprocal(p, x):
    q, k, v = qkv(p, x)
    logits = noted(scores(q, k))
    e = jnp.exp(logits - jnp.max(logits))  # one maximum of all
    return end(p, x, mixed(e * jnp.reciprocal(e.sum(-1, keepdims=True)), v))


@case(SAYS, one(), X, attention="read")
def values_with_a_column_of_ones(p, x):
    q, k, v = qkv(p, x)
    e = jnp.exp(noted(scores(q, k)))
    y = jnp.einsum("bhqk,bkhd->bqhd", e, jnp.concatenate([v, v[..., :1] * 0 + 1], -1))
    return end(p, x, (y[..., :-1] / y[..., -1:]).reshape(B, T, D))


@case(SAYS, one(), X, attention="read")
def off_by_one(p, x):
    q, k, v = qkv(p, x)
    e = jnp.exp(noted(scores(q, k)))
    return end(p, x, mixed(e / (1 + e.sum(-1, keepdims=True)), v))


@case(SAYS + "; sink vector", one(sink=(H,)), X, attention="read")
def with_a_sink(p, x):
    q, k, v = qkv(p, x)
    logits = noted(scores(q, k))
    sink = jnp.broadcast_to(p["sink"][:, None, None], (B, H, T, 1))
    w = jax.nn.softmax(jnp.concatenate([logits, sink], -1))[..., :-1]
    return end(p, x, mixed(w, v))


@case(SAYS, one(), X, attention="read")
def with_a_softcap(p, x):
    q, k, v = qkv(p, x)
    logits = noted(scores(q, k))
    return end(p, x, mixed(jax.nn.softmax(5.0 * jnp.tanh(logits / 5.0)), v))


@case(SAYS, one(), X, attention="read")
def with_a_fixed_temperature(p, x):
    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(scores(q, k) / 0.7), v))


@case(SAYS + "; temperature vector", one(temperature=gains(())), X, attention="read")
def with_a_learned_temperature(p, x):
    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(scores(q, k) * p["temperature"]), v))


@case(SAYS + "; temperature vector", one(temperature=gains(H)), X, attention="read")
def with_a_temperature_for_each_head(p, x):
    q, k, v = qkv(p, x)
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / p["temperature"][:, None, None]
    return end(p, x, mixed(soft(logits), v))


@case(
    SAYS + "; temperature vector", one(temperature=gains(H)), X,
    attention="read", scaled="temperature",
)  # fmt: skip
def temperature_after_unit_query_and_key(p, x):
    q, k, v = qkv(p, x)
    logits = jnp.einsum("bqhd,bkhd->bhqk", unit(q), unit(k))
    return end(p, x, mixed(soft(logits * p["temperature"][:, None, None]), v))


@case(
    SAYS + "; temperature vector", one(temperature=gains(H)), X,
    attention="said", scaled="temperature",
)  # fmt: skip
def exponential_temperature_after_unit_query_and_key(p, x):
    q, k, v = qkv(p, x)
    logits = jnp.einsum("bqhd,bkhd->bhqk", unit(q), unit(k))
    scale = jnp.exp(jnp.minimum(p["temperature"], 4.6))[:, None, None]
    return end(p, x, mixed(soft(logits * scale), v))


@case(SAYS, one(), X, attention="said")
def cosine_of_query_and_key(p, x):
    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(8 * scores(unit(q), unit(k))), v))


@case(SAYS, one(), X, attention="read")
def only_the_key_is_normalized(p, x):
    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(scores(q, 2 * unit(k))), v))


@case(SAYS, one(), X, attention="maybe")
def sigmoids(p, x):
    q, k, v = qkv(p, x)
    return end(p, x, mixed(jax.nn.sigmoid(scores(q, k) - np.log(T)), v))


@case(SAYS, one(), X, attention="maybe")
def squared_relus(p, x):
    q, k, v = qkv(p, x)
    return end(p, x, mixed(jax.nn.relu(scores(q, k)) ** 2 / T, v))


@case(SAYS, one(), X, attention="maybe")
def linear_attention(p, x):
    q, k, v = qkv(p, x)
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    state = jnp.einsum("bkhd,bkhe->bhde", k, v)
    y = jnp.einsum("bqhd,bhde->bqhe", q, state)
    y = y / jnp.einsum("bqhd,bhd->bqh", q, k.sum(1))[..., None]
    return end(p, x, y.reshape(B, T, D))


@case(SAYS, one(), X, attention="maybe")
def retention(p, x):
    q, k, v = qkv(p, x)
    decay = jnp.where(CAUSAL, 0.9 ** jnp.abs(DISTANCE - T + 1), 0)
    return end(p, x, mixed(scores(q, k) * decay, v))


@case(SAYS, one(), X, attention="said")
def squared_relus_divided_by_their_sum(p, x):
    q, k, v = qkv(p, x)
    w = jax.nn.relu(noted(scores(q, k))) ** 2
    return end(p, x, mixed(w / (w.sum(-1, keepdims=True) + 1e-6), v))


@case(SAYS, one(), X, attention="read")
def blocks_with_a_running_maximum(p, x):
    q, k, v = qkv(p, x)
    first = jnp.full((B, H, T), -jnp.inf), jnp.zeros((B, H, T)), jnp.zeros((B, T, H, K))

    def step(state, block):
        top, total, y = state
        logits = noted(scores(q, block[0]), merge="largest")
        new = jnp.maximum(top, logits.max(-1))
        e, keep = jnp.exp(logits - new[..., None]), jnp.exp(top - new)
        y = y * keep.transpose(0, 2, 1)[..., None]
        y = y + jnp.einsum("bhqk,bkhd->bqhd", e, block[1])
        return (new, total * keep + e.sum(-1), y), None

    blocks = [t.reshape(B, 5, 1, H, K).swapaxes(0, 1) for t in (k, v)]
    (_, total, y), _ = jax.lax.scan(step, first, blocks)
    return end(p, x, (y / total.transpose(0, 2, 1)[..., None]).reshape(B, T, D))


@case(SAYS, one(), X, attention="read")
def causal_by_where(p, x):
    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(jnp.where(CAUSAL, scores(q, k), -1e9)), v))


@case(SAYS, one(), X, jnp.asarray(CAUSAL), attention="read")
def masked_by_an_argument(p, x, mask):
    q, k, v = qkv(p, x)
    logits = scores(q, k) + jnp.where(mask, 0.0, -1e9)
    return end(p, x, mixed(soft(logits), v))


@case(SAYS, one(), X, attention="read")
def weights_masked_again_and_divided(p, x):
    q, k, v = qkv(p, x)
    w = soft(scores(q, k)) * CAUSAL
    return end(p, x, mixed(w / w.sum(-1, keepdims=True), v))


@case(SAYS, one(), X, attention="read")
def two_softmaxes_of_the_same_logits(p, x):
    q, k, v = qkv(p, x)
    logits = noted(scores(q, k))
    w = jax.nn.softmax(logits) + 0.1 * jax.nn.softmax(logits, -2)
    return end(p, x, mixed(w, v))


@case(SAYS, one(), X, attention="read")
def the_largest_keys_alone(p, x):
    q, k, v = qkv(p, x)
    logits = noted(scores(q, k))
    least = jax.lax.top_k(logits, 3)[0][..., -1:]
    w = jax.nn.softmax(jnp.where(logits >= least, logits, -jnp.inf))
    return end(p, x, mixed(w, v))


@case(SAYS, one(), X, attention="said")
def sparsemax_by_a_threshold(p, x):
    q, k, v = qkv(p, x)
    logits = noted(scores(q, k))
    w = jax.nn.relu(logits - logits.mean(-1, keepdims=True))
    return end(p, x, mixed(w / jnp.maximum(w.sum(-1, keepdims=True), 1e-6), v))


# What is done to query and key.

GAINS = {"q_gain": gains(K, "q_gain"), "k_gain": gains(K, "k_gain")}


@case(SAYS + "; *_gain vector", one(**GAINS), X, attention="jointly")
def normalized_with_gains(p, x):
    q, k, v = qkv(p, x)
    q, k = rms(q, p["q_gain"]), rms(k, p["k_gain"])
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(SAYS + "; *_gain vector", one(**GAINS), X, attention="said")
def normalized_with_gains_plus_one(p, x):
    q, k, v = qkv(p, x)
    q, k = rms(q, 1 + p["q_gain"]), rms(k, 1 + p["k_gain"])
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(
    SAYS + "; *_gain vector",
    one(q_gain=gains((H, K), "qg"), k_gain=gains((H, K), "kg")), X, attention="read",
)  # fmt: skip
def normalized_with_gains_for_each_head(p, x):
    q, k, v = qkv(p, x)
    q, k = rms(q, p["q_gain"]), rms(k, p["k_gain"])
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(SAYS + "; q_gain vector", one(q_gain=gains(D, "qg")), X, attention="read")
def query_normalized_across_heads(p, x):
    _, k, v = qkv(p, x)
    q = cut(rms(x @ p["q"], p["q_gain"]))
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(
    SAYS + "; *_gain *_shift vector",
    one(**GAINS, q_shift=(K,), k_shift=(K,)), X, attention="said",
)  # fmt: skip
def layer_norm_with_gains_and_shifts(p, x):
    def norm(y, n):
        y = y - y.mean(-1, keepdims=True)
        return rms(y, p[n + "_gain"]) + p[n + "_shift"]

    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(scores(norm(q, "q"), norm(k, "k"))), v))


@case(SAYS, one(), X, attention="said")
def normalized_without_gains(p, x):
    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(3 * scores(rms(q), rms(k))), v))


@case(SAYS, one(), X, attention="said")
def clamped(p, x):
    q, k, v = (cut(jnp.clip(x @ p[n], -0.8, 0.8)) for n in "qkv")
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(SAYS, one(), X, attention="said")
def without_nans(p, x):
    q, k, v = (cut(jnp.nan_to_num(x @ p[n])) for n in "qkv")
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(SAYS, one(), X, attention="said")
def query_through_a_gelu(p, x):
    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(scores(jax.nn.gelu(q), k)), v))


@case(SAYS, one(), X, attention="read")
def query_and_key_through_relus(p, x):
    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(scores(jax.nn.relu(q), jax.nn.relu(k))), v))


@case(SAYS + "; *_bias vector", one(q_bias=(D,), k_bias=(D,)), X, attention="read")
def flat_biases(p, x):
    q, k = cut(x @ p["q"] + p["q_bias"]), cut(x @ p["k"] + p["k_bias"])
    return end(p, x, mixed(soft(scores(q, k)), cut(x @ p["v"])))


@case(SAYS + "; *_bias vector", one(q_bias=(H, K), r_bias=(H, K)), X,
      attention="said", scaled="r_bias")  # fmt: skip
def two_biases_of_queries(p, x):
    """Transformer-XL, without its positions."""
    q, k, v = qkv(p, x)
    logits = scores(q + p["q_bias"], k) + scores(q + p["r_bias"], 0.3 * k)
    return end(p, x, mixed(soft(logits), v))


# Positions.


def turned(y):
    angle = jnp.arange(y.shape[1])[:, None, None] / 10.0 ** jnp.arange(K // 2)
    a, b = jnp.split(y, 2, -1)
    s, c = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * c - b * s, a * s + b * c], -1)


@case(SAYS, one(), X, attention="read")
def rotary_by_halves(p, x):
    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(scores(turned(q), turned(k))), v))


@case(SAYS, one(), X, attention="read")
def rotary_interleaved(p, x):
    def turn(y):
        angle = jnp.arange(T)[:, None, None] / 10.0 ** jnp.arange(K // 2)
        a, b = y[..., ::2], y[..., 1::2]
        s, c = jnp.sin(angle), jnp.cos(angle)
        return jnp.stack([a * c - b * s, a * s + b * c], -1).reshape(y.shape)

    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(scores(turn(q), turn(k))), v))


@case(SAYS, one(), X, attention="read")
def rotary_complex(p, x):
    def turn(y):
        angle = jnp.arange(T)[:, None, None] / 10.0 ** jnp.arange(K // 2)
        pairs = y.reshape(*y.shape[:-1], -1, 2)
        z = jax.lax.complex(pairs[..., 0], pairs[..., 1]) * jnp.exp(1j * angle)
        return jnp.stack([z.real, z.imag], -1).reshape(y.shape)

    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(scores(turn(q), turn(k))), v))


@case(SAYS, one(), X, attention="read")
def rotary_of_a_part(p, x):
    def turn(y):
        angle = jnp.arange(T)[:, None, None] / jnp.ones(1)
        a, b, rest = y[..., :1], y[..., 1:2], y[..., 2:]
        s, c = jnp.sin(angle), jnp.cos(angle)
        return jnp.concatenate([a * c - b * s, a * s + b * c, rest], -1)

    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(scores(turn(q), turn(k))), v))


@case(SAYS + "; table vector~embedding", one(table=(2 * T - 1, H)), X,
      attention="biased", scaled="table")  # fmt: skip
def learned_bias_by_distance(p, x):
    q, k, v = qkv(p, x)
    bias = jnp.moveaxis(p["table"][DISTANCE], -1, 0)
    return end(p, x, mixed(soft(scores(q, k) + bias), v))


@case(SAYS, one(), X, attention="biased")
def slopes_by_head(p, x):
    """ALiBi: a fixed bias is added to the logits."""
    q, k, v = qkv(p, x)
    slopes = 0.1**np.arange(1, H + 1)[:, None, None] * -np.abs(DISTANCE - T + 1)
    return end(p, x, mixed(soft(scores(q, k) + slopes), v))


@case(SAYS, one(), X, array("pairs", H, T, T), attention="biased")
def bias_of_pairs_among_the_arguments(p, x, pairs):
    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(scores(q, k) + 0.3 * pairs), v))


@case(SAYS + "; table vector~embedding", one(table=(2 * T - 1, K)), X,
      attention="said", scaled="table")  # fmt: skip
def positions_added_to_keys(p, x):
    q, k, v = qkv(p, x)
    keys = k[:, None] + p["table"][DISTANCE][None, :, :, None]
    logits = jnp.einsum("bqhd,bqkhd->bhqk", q, keys)
    return end(p, x, mixed(soft(logits), v))


@case(SAYS + "; table any", one(table=(2 * T - 1, K)), X, attention="said",
      scaled="table")  # fmt: skip
def relative_keys_by_a_product(p, x):
    q, k, v = qkv(p, x)
    far = jnp.einsum("bqhd,rd->bhqr", q, p["table"])
    at = jnp.broadcast_to(DISTANCE, (B, H, T, T))
    logits = scores(q, k) + jnp.take_along_axis(far, at, -1)
    return end(p, x, mixed(soft(logits), v))


@case(SAYS + "; table any", one(table=(H, T, K)), X, attention="said", scaled="table")
def relative_keys_by_a_skew(p, x):
    q, k, v = qkv(p, x)
    far = jnp.einsum("bqhd,hrd->bhqr", q, p["table"])
    far = jnp.pad(far, ((0, 0), (0, 0), (0, 0), (1, 0)))
    far = far.reshape(B, H, T + 1, T)[:, :, 1:]
    return end(p, x, mixed(soft(jnp.where(CAUSAL, scores(q, k) + far, -1e9)), v))


@case(SAYS + "; r any; *_bias vector",
      one(r=(D, D), u_bias=(H, K), w_bias=(H, K)), X, attention="said",
      scaled="r u_bias w_bias")  # fmt: skip
def transformer_xl(p, x):
    q, k, v = qkv(p, x)
    waves = jnp.asarray(np.sin(np.arange(2 * T - 1)[:, None] * np.arange(1, D + 1)))
    r = cut(jnp.asarray(waves, jnp.float32) @ p["r"])
    content = jnp.einsum("bqhd,bkhd->bhqk", q + p["u_bias"], k)
    place = jnp.einsum("bqhd,rhd->bhqr", q + p["w_bias"], r)
    at = jnp.broadcast_to(DISTANCE, (B, H, T, T))
    logits = (content + jnp.take_along_axis(place, at, -1)) * K**-0.5
    return end(p, x, mixed(soft(logits), v))


@case(SAYS + "; table vector~embedding", one(table=(T, D)), X, attention="read")
def positions_added_to_the_input(p, x):
    x = x + p["table"]
    q, k, v = qkv(p, x)
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(SAYS + "; table vector~embedding", one(table=(T, D)), X, attention="read")
def positions_added_to_query_and_key_alone(p, x):
    y = x + p["table"]
    q, k, v = cut(y @ p["q"]), cut(y @ p["k"]), cut(x @ p["v"])
    return end(p, x, mixed(soft(scores(q, k)), v))


# Heads that share, mix, or are mixed.


@case(SAYS + "; mix 0|1~1|0~vector", one(mix=(H, H)), X, attention="said", scaled="mix")
def talking_heads_before(p, x):
    q, k, v = qkv(p, x)
    logits = jnp.einsum("bhqk,hg->bgqk", scores(q, k), p["mix"])
    return end(p, x, mixed(soft(logits), v))


@case(SAYS + "; mix 0|1~1|0~vector", one(mix=(H, H)), X, attention="read")
def talking_heads_after(p, x):
    q, k, v = qkv(p, x)
    w = jnp.einsum("bhqk,hg->bgqk", soft(scores(q, k)), p["mix"])
    return end(p, x, mixed(w, v))


@case("q o 0|1; k v 0|1; head head", one(k=(D, K), v=(D, K)), X, attention="read")
def one_key_for_all(p, x):
    q, k, v = cut(x @ p["q"]), x @ p["k"], x @ p["v"]
    w = soft(jnp.einsum("bqhd,bkd->bhqk", q, k) * K**-0.5)
    y = jnp.einsum("bhqk,bkd->bqhd", w, v)
    return end(p, x, y.reshape(B, T, D))


GROUPED = one(q=(D, 16), k=(D, 8), v=(D, 8), o=(16, D))


@case(SAYS, GROUPED, X, attention="read")
def groups_by_repeat(p, x):
    q, k, v = cut(x @ p["q"], 4), cut(x @ p["k"], 2), cut(x @ p["v"], 2)
    k, v = jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(SAYS, GROUPED, X, attention="read")
def groups_by_reshape(p, x):
    q, k, v = cut(x @ p["q"], 4), cut(x @ p["k"], 2), cut(x @ p["v"], 2)
    q = q.reshape(B, T, 2, 2, 4)
    w = soft(jnp.einsum("bqgrd,bkgd->bgrqk", q, k) * 0.5, heads=(-4, -3))
    y = jnp.einsum("bgrqk,bkgd->bqgrd", w, v)
    return end(p, x, y.reshape(B, T, 16))


@case(SAYS, GROUPED, X, attention="read")
def groups_by_tile(p, x):
    q, k, v = cut(x @ p["q"], 4), cut(x @ p["k"], 2), cut(x @ p["v"], 2)
    k, v = jnp.tile(k, (1, 1, 2, 1)), jnp.tile(v, (1, 1, 2, 1))
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(SAYS, GROUPED, X, attention="read")
def groups_by_vmap(p, x):
    q, k, v = cut(x @ p["q"], 4), cut(x @ p["k"], 2), cut(x @ p["v"], 2)

    def group(q, k, v):
        w = soft(jnp.einsum("bqrd,bkd->brqk", q, k) * 0.5, heads=(-5, -3))
        return jnp.einsum("brqk,bkd->bqrd", w, v)

    y = jax.vmap(group, (2, 2, 2), 2)(q.reshape(B, T, 2, 2, 4), k, v)
    return end(p, x, y.reshape(B, T, 16))


@case(SAYS, GROUPED, X, attention="read")
def groups_by_taking(p, x):
    q, k, v = cut(x @ p["q"], 4), cut(x @ p["k"], 2), cut(x @ p["v"], 2)
    of = np.array([0, 0, 1, 1])
    return end(p, x, mixed(soft(scores(q, k[:, :, of])), v[:, :, of]))


@case("qk v o 0|1; head head", one(q=None, k=None, qk=(D, D)), X, attention="read")
def tied_query_and_key(p, x):
    q, v = cut(x @ p["qk"]), cut(x @ p["v"])
    return end(p, x, mixed(soft(scores(q, q)), v))


@case("qk v o 0|1; *_gain vector; head head",
      one(q=None, k=None, qk=(D, D), q_gain=gains((H, K), "a"),
          k_gain=gains((H, K), "b")), X, attention="read")  # fmt: skip
def tied_query_and_key_with_gains(p, x):
    y, v = cut(x @ p["qk"]), cut(x @ p["v"])
    return end(p, x, mixed(soft(scores(y * p["q_gain"], y * p["k_gain"])), v))


@case("q o kv 0|1; head head", one(k=None, v=None, kv=(D, D)), X, attention="read")
def tied_key_and_value(p, x):
    q, k = cut(x @ p["q"]), cut(x @ p["kv"])
    return end(p, x, mixed(soft(scores(q, k)), k))


@case("kv q o 0|1; k_up 0|12~2|1~12|0~1|2~2|01; v_up any; head head",
      one(k=None, v=None, kv=(D, 6), k_up=(6, H, K), v_up=(6, H, K)), X,
      attention="read")  # fmt: skip
def latent_keys_and_values(p, x):
    q, latent = cut(x @ p["q"]), x @ p["kv"]
    k = jnp.einsum("btc,chk->bthk", latent, p["k_up"])
    v = jnp.einsum("btc,chk->bthk", latent, p["v_up"])
    return end(p, x, mixed(soft(scores(q, k)), v))


@case("kv q o 0|1; k_up any; v_up any; k_rope q_rope 0|1; head head",
      one(k=None, v=None, kv=(D, 6), k_up=(6, H, K), v_up=(6, H, K), q_rope=(D, D),
          k_rope=(D, K)), X, attention="read")  # fmt: skip
def latent_with_rotary_parts(p, x):
    q, latent = cut(x @ p["q"]), x @ p["kv"]
    k = jnp.einsum("btc,chk->bthk", latent, p["k_up"])
    v = jnp.einsum("btc,chk->bthk", latent, p["v_up"])
    shared = turned((x @ p["k_rope"])[:, :, None])[:, :, 0]
    logits = jnp.einsum("bqhd,bkd->bhqk", turned(cut(x @ p["q_rope"])), shared)
    return end(p, x, mixed(soft(scores(q, k) + 0.3 * logits), v))


@case("kv q o 0|1; k_up any; v_up any; head head",
      one(k=None, v=None, kv=(D, 6), k_up=(6, H, K), v_up=(6, H, K)), X,
      attention="read")  # fmt: skip
def latent_absorbed_into_the_query(p, x):
    q, latent = cut(x @ p["q"]), x @ p["kv"]
    q = jnp.einsum("bqhk,chk->bqhc", q, p["k_up"])
    w = soft(jnp.einsum("bqhc,bkc->bhqk", q, latent))
    y = jnp.einsum("bhqk,bkc,chd->bqhd", w, latent, p["v_up"])
    return end(p, x, y.reshape(B, T, D))


@case(SAYS + "; gate 0|1", one(gate=(D, D)), X, attention="read")
def gated(p, x):
    q, k, v = qkv(p, x)
    y = mixed(soft(scores(q, k)), v) * jax.nn.sigmoid(x @ p["gate"])
    return end(p, x, y)


@case("q1 q2 k1 k2 v o 0|1; mix vector; head head",
      one(q=None, k=None, q1=(D, D), q2=(D, D), k1=(D, D), k2=(D, D), mix=(H,)), X,
      attention="read")  # fmt: skip
def difference_of_two_softmaxes(p, x):
    q1, q2, k1, k2, v = (cut(x @ p[n]) for n in ("q1", "q2", "k1", "k2", "v"))
    a = soft(scores(q1, k1), layer="first")
    b = soft(scores(q2, k2), layer="second")
    return end(p, x, mixed(a - p["mix"][:, None, None] * b, v))


@case(SAYS, one(q=(D, 2 * D), k=(D, 2 * D)), X, attention="read")
def difference_of_halves_of_heads(p, x):
    q, k, v = cut(x @ p["q"], 2 * H), cut(x @ p["k"], 2 * H), cut(x @ p["v"])
    w = soft(scores(q, k)).reshape(B, H, 2, T, T)
    return end(p, x, mixed(w[:, :, 0] - 0.3 * w[:, :, 1], v))


# Loops of heads, and of everything else.


@case(SAYS, one(), X, attention="said")
def heads_in_a_python_loop(p, x):
    q, k, v = qkv(p, x)
    ys = []
    for h in range(H):
        logits = jnp.einsum("bqd,bkd->bqk", q[:, :, h], k[:, :, h]) * K**-0.5
        ys.append(soft(logits, heads=(), layer="all", merge="heads") @ v[:, :, h])
    return end(p, x, jnp.concatenate(ys, -1))


@case(SAYS + "; *_bias vector", one(q_bias=(D,), k_bias=(D,)), X, attention="said")
def heads_and_biases_sliced_in_a_python_loop(p, x):
    ys = []
    for h in range(H):
        own = slice(h * K, (h + 1) * K)
        q = x @ p["q"][:, own] + p["q_bias"][own]
        k = x @ p["k"][:, own] + p["k_bias"][own]
        w = soft(q @ k.mT, heads=(), layer="all", merge="heads")
        ys.append(w @ (x @ p["v"][:, own]))
    return end(p, x, jnp.concatenate(ys, -1))


def _one_head(q, k, v):
    w = soft(jnp.einsum("bqd,bkd->bqk", q, k) * K**-0.5, heads=(), layer="all",
             merge="heads")  # fmt: skip
    return w @ v


@case(SAYS + "; *_bias vector", one(q_bias=(D,), k_bias=(D,)), X, attention="said")
def heads_in_a_map(p, x):
    q, k, v = cut(x @ p["q"] + p["q_bias"]), cut(x @ p["k"] + p["k_bias"]), x @ p["v"]
    heads = tuple(jnp.moveaxis(t, 2, 0) for t in (q, k, cut(v)))
    y = jax.lax.map(lambda t: _one_head(*t), heads)
    return end(p, x, jnp.moveaxis(y, 0, 2).reshape(B, T, D))


@case(SAYS, one(), X, attention="said")
def heads_in_a_scan(p, x):
    heads = tuple(jnp.moveaxis(t, 2, 0) for t in qkv(p, x))
    y = jax.lax.scan(lambda c, t: (c, _one_head(*t)), 0, heads)[1]
    return end(p, x, jnp.moveaxis(y, 0, 2).reshape(B, T, D))


@case(SAYS, one(), X, attention="said")
def heads_in_a_fori_loop(p, x):
    q, k, v = qkv(p, x)

    def step(h, y):
        own = [jax.lax.dynamic_index_in_dim(t, h, 2, False) for t in (q, k, v)]
        return jax.lax.dynamic_update_index_in_dim(y, _one_head(*own), h, 2)

    y = jax.lax.fori_loop(0, H, step, jnp.zeros_like(v))
    return end(p, x, y.reshape(B, T, D))


@case("q k v 1|2~1|02; o 0|1; head head",
      one(q=(H, D, K), k=(H, D, K), v=(H, D, K)), X, attention="said")  # fmt: skip
def heads_with_kernels_of_their_own_in_a_map(p, x):
    y = jax.lax.map(
        lambda t: _one_head(x @ t["q"], x @ t["k"], x @ t["v"]),
        {n: p[n] for n in "qkv"},
    )
    return end(p, x, jnp.moveaxis(y, 0, 2).reshape(B, T, D))


@case("q k v 1|2~1|02; o 0|1; head head",
      one(q=(H, D, K), k=(H, D, K), v=(H, D, K)), X, attention="read")  # fmt: skip
def heads_by_vmap(p, x):
    def head(q, k, v):
        q, k, v = x @ q, x @ k, x @ v
        return soft(q @ k.mT * K**-0.5, heads=-4) @ v

    y = jax.vmap(head, out_axes=2)(p["q"], p["k"], p["v"])
    return end(p, x, y.reshape(B, T, D))


@case(SAYS, one(), X, attention="read")
def examples_by_vmap(p, x):
    def example(x):
        q, k, v = (cut(x @ p[n]) for n in "qkv")
        w = soft(jnp.einsum("qhd,khd->hqk", q, k) * K**-0.5)
        y = jnp.einsum("hqk,khd->qhd", w, v).reshape(T, D)
        return end(p, x, y)

    return jax.vmap(example)(x)


@case(SAYS, one(), X, attention="read", plain=plain)
def remat_in_jit(p, x):
    @jax.jit
    @jax.checkpoint
    def layer(p, x):
        q, k, v = qkv(p, x)
        return mixed(soft(scores(q, k)), v)

    return end(p, x, layer(p, x))


@case(SAYS, one(), X, jnp.asarray(True), attention="read")
def in_a_branch(p, x, flag):
    q, k, v = qkv(p, x)
    y = jax.lax.cond(flag, lambda: mixed(soft(scores(q, k)), v), lambda: 0 * x)
    return end(p, x, y)
