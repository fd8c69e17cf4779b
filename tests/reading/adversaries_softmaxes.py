"""Softmaxes that are hard to see."""

import jax
import jax.numpy as jnp
import numpy as np
from by_numbers import noted
from pieces_of_cases import (
    B,
    case,
    CAUSAL,
    D,
    DISTANCE,
    end,
    gains,
    H,
    K,
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


@case(SAYS, one(), X)
def softmaxes_of_query_and_of_key(p, x):
    """Efficient attention: the query's softmax weighs features of keys, no experts."""
    q, k, v = qkv(p, x)
    state = (jax.nn.softmax(k, 1)[..., None] * v[..., None, :]).sum(1)
    y = (jax.nn.softmax(q)[..., None] * state[:, None]).sum(-2)
    return end(p, x, y.reshape(B, T, D))


@case(SAYS, one(), X)
def softmaxes_of_query_and_of_key_one_after_the_other(p, x):
    def step(state, now):
        q, k, v = now
        state = state + k[..., None] * v[..., None, :]
        return state, jnp.einsum("bhd,bhde->bhe", q, state)

    q, k, v = (y.swapaxes(0, 1) for y in qkv(p, x))
    now = jax.nn.softmax(q), jax.nn.softmax(k), v
    _, y = jax.lax.scan(step, jnp.zeros((B, H, K, K)), now)
    return end(p, x, y.swapaxes(0, 1).reshape(B, T, D))


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


@case(SAYS, one(), X, attention="said")
def sparsemax_by_a_threshold(p, x):
    q, k, v = qkv(p, x)
    logits = noted(scores(q, k))
    w = jax.nn.relu(logits - logits.mean(-1, keepdims=True))
    return end(p, x, mixed(w / jnp.maximum(w.sum(-1, keepdims=True), 1e-6), v))


@case(SAYS, one(), X, attention="read")
def query_scaled_by_the_logarithm_of_its_place(p, x):
    q, k, v = qkv(p, x)
    q = q * jnp.log(2.0 + jnp.arange(T))[:, None, None]
    return end(p, x, mixed(soft(scores(q, k)), v))


@case(SAYS, one(), X, attention="maybe")
def sticks_that_break(p, x):
    q, k, v = qkv(p, x)
    logits = scores(q, k)
    left = jnp.cumsum(jax.nn.log_sigmoid(-logits), -1) - jax.nn.log_sigmoid(-logits)
    return end(p, x, mixed(jnp.exp(jax.nn.log_sigmoid(logits) + left), v))
