"""Softmaxes that are hard to see."""

import jax
import jax.numpy as jnp
import numpy as np
from by_numbers import noted
from pieces_of_cases import (
    array,
    B,
    case,
    CAUSAL,
    D,
    DISTANCE,
    end,
    gains,
    H,
    K,
    KEY,
    mixed,
    one,
    qkv,
    SAYS,
    scores,
    soft,
    T,
    unit,
    X,
)


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
    SAYS + "; temperature vector",
    one(temperature=gains(H)),
    X,
    attention="read",
    scaled="temperature",
)
def temperature_after_unit_query_and_key(p, x):
    q, k, v = qkv(p, x)
    logits = jnp.einsum("bqhd,bkhd->bhqk", unit(q), unit(k))
    return end(p, x, mixed(soft(logits * p["temperature"][:, None, None]), v))


@case(
    SAYS + "; temperature vector",
    one(temperature=gains(H)),
    X,
    attention="said",
    scaled="temperature",
)
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


# Blocks of one key: the softmax has no axis that would show which operand is the key.
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


@case(SAYS, one(), array("grid", B, 3, 4, D), attention="read")
def over_two_axes_at_once(p, x):
    q, k, v = qkv(p, x)
    logits = jnp.einsum("byxhd,brchd->bhyxrc", q, k) * 0.5
    w = jax.nn.softmax(noted(logits, heads=-5), axis=(-2, -1))
    y = jnp.einsum("bhyxrc,brchd->byxhd", w, v)
    return end(p, x, y.reshape(x.shape))


@case(SAYS, one(), X, KEY, attention="biased")
def noise_added_to_logits(p, x, key):
    q, k, v = qkv(p, x)
    noise = jax.random.gumbel(jax.random.wrap_key_data(key), (B, H, T, T))
    return end(p, x, mixed(soft(scores(q, k) + 0.1 * noise), v))


@case(SAYS, one(), X, KEY, attention="read")
def weights_dropped_by_a_key(p, x, key):
    q, k, v = qkv(p, x)
    w = soft(scores(q, k))
    keep = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.7, w.shape)
    return end(p, x, mixed(jnp.where(keep, w / 0.7, 0), v))


@case(SAYS, one(), X, attention="said")
def exponents_clamped(p, x):
    q, k, v = qkv(p, x)
    e = jnp.exp(jnp.minimum(noted(scores(q, k)), 30.0))
    return end(p, x, mixed(e / e.sum(-1, keepdims=True), v))


@case(SAYS, one(), X, attention="read")
def softcap_and_then_a_mask(p, x):
    q, k, v = qkv(p, x)
    logits = scores(q, k)
    noted(jnp.where(CAUSAL, logits, -jnp.inf))
    capped = jnp.where(CAUSAL, 5.0 * jnp.tanh(logits / 5.0), -1e9)
    return end(p, x, mixed(jax.nn.softmax(capped), v))


@case(SAYS + "; t any", one(t=(D, H)), X, attention="read")
def temperature_by_the_data(p, x):
    q, k, v = qkv(p, x)
    q = q * jax.nn.softplus(x @ p["t"])[..., None]
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(SAYS, one(), X, attention="read")
def query_scaled_by_the_logarithm_of_its_place(p, x):
    q, k, v = qkv(p, x)
    q = q * jnp.log(2.0 + jnp.arange(T))[:, None, None]
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(SAYS + "; forget any", one(forget=(D, H)), X, attention="biased")
def gates_that_forget(p, x):
    """Sums of log gates are added to the logits."""
    q, k, v = qkv(p, x)
    kept = jnp.cumsum(jax.nn.log_sigmoid(x @ p["forget"] + 4), 1).swapaxes(1, 2)
    logits = scores(q, k) + kept[..., None] - kept[:, :, None]
    return end(p, x, mixed(soft(jnp.where(CAUSAL, logits, -1e9)), v))


@case(SAYS, one(), X, attention="maybe")
def sticks_that_break(p, x):
    q, k, v = qkv(p, x)
    logits = scores(q, k)
    left = jnp.cumsum(jax.nn.log_sigmoid(-logits), -1) - jax.nn.log_sigmoid(-logits)
    return end(p, x, mixed(jnp.exp(jax.nn.log_sigmoid(logits) + left), v))


@case(SAYS, one(), X, attention="read")
def two_masks_of_the_same_query_and_key(p, x):
    q, k, v = qkv(p, x)
    near = np.abs(np.arange(T)[:, None] - np.arange(T)) < 2
    a = soft(jnp.where(near, scores(q, k), -1e9), layer="all", merge="largest")
    b = soft(jnp.where(CAUSAL, 0.9 * scores(q, k), -1e9), layer="all", merge="largest")
    return end(p, x, mixed(a, v) + jnp.tanh(mixed(b, v)))


@case(SAYS, one(), array("long", B, 8, D, scale=1.5), attention="read")
def landmarks(p, x):
    """Nystrom: three softmaxes of queries, keys and their means."""
    q, k, v = qkv(p, x)
    few = [2 * t.reshape(B, 4, 2, H, K).mean(2) for t in (q, k)]
    a = soft(scores(q, few[1]), layer="all", merge="largest")
    b = soft(scores(few[0], few[1]), layer="all", merge="largest")
    c = soft(scores(few[0], k), layer="all", merge="largest")
    return end(p, x, mixed(a @ (2 * jnp.eye(4) - b) @ c, v))
