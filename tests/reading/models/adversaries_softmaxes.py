"""Softmaxes that are hard to see."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from by_numbers import noted
from pieces_of_cases import (
    array,
    attend,
    B,
    case,
    CAUSAL,
    cut,
    D,
    DISTANCE,
    end,
    formulas,
    gains,
    H,
    heads,
    K,
    mixed,
    qkv,
    scores,
    soft,
    sums_of_both,
    T,
    unit,
    weights,
    X,
)


@heads("read")
def plain(q, k, v):
    return attend(q, k, v)


@heads("read")
def base_two_without_a_factor(q, k, v):
    e = jnp.exp2(noted(scores(q, k), unit=np.log(2)))
    return mixed(e / e.sum(-1, keepdims=True), v)


@heads("read")
def base_two_by_power(q, k, v):
    e = jnp.power(2.0, noted(scores(q, k), unit=np.log(2)))
    return mixed(e / e.sum(-1, keepdims=True), v)


@heads("read")
def divided_after_the_values(q, k, v):
    logits = noted(scores(q, k))
    e = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    total = jnp.einsum("bhqk->bqh", e)[..., None]
    return jnp.einsum("bhqk,bkhd->bqhd", e, v) / total


@heads("read")
def times_the_reciprocal(q, k, v):
    logits = noted(scores(q, k))
    e = jnp.exp(logits - jnp.max(logits))  # one maximum of all
    return mixed(e * jnp.reciprocal(e.sum(-1, keepdims=True)), v)


@heads("read")
def values_with_a_column_of_ones(q, k, v):
    e = jnp.exp(noted(scores(q, k)))
    y = jnp.einsum("bhqk,bkhd->bqhd", e, jnp.concatenate([v, v[..., :1] * 0 + 1], -1))
    return y[..., :-1] / y[..., -1:]


@heads("read")
def off_by_one(q, k, v):
    e = jnp.exp(noted(scores(q, k)))
    return mixed(e / (1 + e.sum(-1, keepdims=True)), v)


@heads("read", also="sink vector", sink=(H,))
def with_a_sink(q, k, v, sink):
    logits = noted(scores(q, k))
    sink = jnp.broadcast_to(sink[:, None, None], (B, H, T, 1))
    w = jax.nn.softmax(jnp.concatenate([logits, sink], -1))[..., :-1]
    return mixed(w, v)


HEAT = {"also": "temperature vector", "scaled": "temperature", "temperature": gains(H)}


def _times(scale, q, k, v):
    """A scale for each head."""
    logits = jnp.einsum("bqhd,bkhd->bhqk", unit(q), unit(k))
    return mixed(soft(logits * scale[:, None, None]), v)


@heads("read", **HEAT)
def temperature_after_unit_query_and_key(q, k, v, temperature):
    return _times(temperature, q, k, v)


@heads("said", **HEAT)
def exponential_temperature_after_unit_query_and_key(q, k, v, temperature):
    return _times(jnp.exp(jnp.minimum(temperature, 4.6)), q, k, v)


formulas(
    "maybe",
    sigmoids=lambda q, k, v: mixed(jax.nn.sigmoid(scores(q, k) - np.log(T)), v),
    squared_relus=lambda q, k, v: mixed(jax.nn.relu(scores(q, k)) ** 2 / T, v),
)


@heads("maybe")
def linear_attention(q, k, v):
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    state = jnp.einsum("bkhd,bkhe->bhde", k, v)
    y = jnp.einsum("bqhd,bhde->bqhe", q, state)
    return y / jnp.einsum("bqhd,bhd->bqh", q, k.sum(1))[..., None]


@heads("none")
def softmaxes_of_query_and_of_key(q, k, v):
    """Efficient attention: the query's softmax weighs features of keys, no experts."""
    state = (jax.nn.softmax(k, 1)[..., None] * v[..., None, :]).sum(1)
    return (jax.nn.softmax(q)[..., None] * state[:, None]).sum(-2)


@heads("none")
def softmaxes_of_query_and_of_key_one_after_the_other(q, k, v):
    def step(state, now):
        q, k, v = now
        state = state + k[..., None] * v[..., None, :]
        return state, jnp.einsum("bhd,bhde->bhe", q, state)

    q, k, v = (y.swapaxes(0, 1) for y in (q, k, v))
    now = jax.nn.softmax(q), jax.nn.softmax(k), v
    return jax.lax.scan(step, jnp.zeros((B, H, K, K)), now)[1].swapaxes(0, 1)


@heads("maybe")
def retention(q, k, v):
    decay = jnp.where(CAUSAL, 0.9 ** jnp.abs(DISTANCE - T + 1), 0)
    return mixed(scores(q, k) * decay, v)


@heads("said")
def squared_relus_divided_by_their_sum(q, k, v):
    w = jax.nn.relu(noted(scores(q, k))) ** 2
    return mixed(w / (w.sum(-1, keepdims=True) + 1e-6), v)


@heads("said")
def sparsemax_by_a_threshold(q, k, v):
    logits = noted(scores(q, k))
    w = jax.nn.relu(logits - logits.mean(-1, keepdims=True))
    return mixed(w / jnp.maximum(w.sum(-1, keepdims=True), 1e-6), v)


@heads("read")
def query_scaled_by_the_logarithm_of_its_place(q, k, v):
    return attend(q * jnp.log(2.0 + jnp.arange(T))[:, None, None], k, v)


@heads("named")
def sticks_that_break(q, k, v):
    logits = scores(q, k)
    left = jnp.cumsum(jax.nn.log_sigmoid(-logits), -1) - jax.nn.log_sigmoid(-logits)
    return mixed(jnp.exp(jax.nn.log_sigmoid(logits) + left), v)


# Softmaxes however they are summed, and keys from elsewhere in the same softmax.


N = 4
KEYS = np.asarray(array("keys", B, N, H, K, scale=4.0))
VALUES = np.asarray(array("values", B, N, H, K))
START = (
    np.full((B, T, H), -1e30, np.float32),
    *(np.zeros((B, T, H, *of), np.float32) for of in ((), (K,))),
)


def _added(state, q, key, value, **where):
    """One more key in a softmax with a running maximum."""
    top, total, y = state
    logits = noted(jnp.einsum("bqhd,bhd->bqh", q, key), -1, merge="largest", **where)
    new = jnp.maximum(top, logits)
    e, keep = jnp.exp(logits - new), jnp.exp(top - new)
    y = y * keep[..., None] + e[..., None] * value[:, None]
    return new, total * keep + e, y


def _each(*of):
    return tuple(x.swapaxes(0, 1) for x in of)


@heads("read")
def keys_picked_one_by_one(q, k, v):
    def add(t, state):
        return _added(state, q, k[:, t], v[:, t])

    _, total, y = jax.lax.fori_loop(0, T, add, START)
    return y / total[..., None]


@heads("read", X, KEYS, VALUES)
def keys_one_by_one_after_a_cache(q, k, v, keys, values):
    def add(state, of):
        return _added(state, q, *of, layer="one"), None

    state, _ = jax.lax.scan(add, START, _each(keys, values))
    (_, total, y), _ = jax.lax.scan(add, state, _each(k, v))
    return y / total[..., None]


@heads("read")
def queries_and_keys_one_by_one(q, k, v):
    def of_query(q):
        def add(state, of):
            total, y = state
            logits = noted(jnp.sum(q * of[0], -1), -1, "one", "largest")
            e = jnp.exp(logits)
            return (total + e, y + e[..., None] * of[1]), None

        start = jnp.zeros((B, H)), jnp.zeros((B, H, K))
        (total, y), _ = jax.lax.scan(add, start, _each(k, v))
        return y / total[..., None]

    return jax.lax.map(of_query, q.swapaxes(0, 1)).swapaxes(0, 1)


def _by_distance(q, k, v):
    """The logits and values of the keys at three distances, written out."""
    for distance in range(3):
        key, value = (jnp.roll(x, distance, 1) for x in (k, v))
        yield noted(jnp.sum(key * q, -1), -1, "one", "largest"), value


@heads("read")
def keys_by_their_distance(q, k, v):
    total = y = 0.0
    for logits, value in _by_distance(q, k, v):
        e = jnp.exp(logits)
        total, y = total + e, y + e[..., None] * value
    return y / total[..., None]


@heads("read")
def keys_by_their_distance_under_the_largest(q, k, v):
    logits, values = zip(*_by_distance(q, k, v), strict=True)
    top = functools.reduce(jnp.maximum, logits)
    e = [jnp.exp(x - top) for x in logits]
    pairs = zip(e, values, strict=True)
    return sum((x / sum(e))[..., None] * value for x, value in pairs)


@heads("read")
def keys_by_their_distance_and_a_logarithm(q, k, v):
    pairs = [*_by_distance(q, k, v)]
    log_total = jnp.log(sum(jnp.exp(logits) for logits, _ in pairs))
    return sum(jnp.exp(x - log_total)[..., None] * value for x, value in pairs)


@heads("read")
def sums_over_all_keys_before(q, k, v):
    logits = noted(jnp.einsum("bhd,bkhd->bhk", q[:, -1], k), -2)
    e = jnp.exp(logits - logits.max(-1, keepdims=True))
    y = jnp.cumsum(e[..., None] * v.swapaxes(1, 2), 2) / jnp.cumsum(e, 2)[..., None]
    return y.swapaxes(1, 2)


@heads("read", X, np.ones(T, np.float32), np.tril(np.ones((T, T), np.float32)))
def sums_by_products_with_ones_and_a_mask(q, k, v, ones, mask):
    e = jnp.exp(noted(scores(q, k))) * mask
    return mixed(e / (e @ ones)[..., None], v)


@heads("read")
def sums_by_an_associative_scan(q, k, v):
    logits = noted(jnp.einsum("bhd,bkhd->kbh", q[:, 0], k), -1)
    start = logits, jnp.ones_like(logits), v.swapaxes(0, 1)
    _, total, y = jax.lax.associative_scan(sums_of_both, start)
    return (y / total[..., None]).swapaxes(0, 1)


@heads("read")
def logarithms_of_running_sums(q, k, v):
    logits = noted(scores(q, k))
    total = jax.lax.cumlogsumexp(logits, axis=3)[..., -1:]
    return mixed(jnp.exp(logits - total), v)


# Keys from elsewhere.


@heads("read", X, KEYS, VALUES)
def cache_before_own_keys(q, k, v, keys, values):
    w = soft(jnp.concatenate([scores(q, keys), scores(q, k)], -1))
    return mixed(w[..., :N], values) + mixed(w[..., N:], v)


# The square is not linear in the query, whatever is next to it.
@heads("said", X, KEYS, VALUES)
def cache_with_squared_logits(q, k, v, keys, values):
    w = soft(jnp.concatenate([scores(q, keys) ** 2, scores(q, k)], -1))
    return mixed(w[..., :N], values) + mixed(w[..., N:], v)


@heads("read", X, KEYS[0], VALUES[0])
def bank_for_all_examples_after_own_keys(q, k, v, keys, values):
    of_bank = jnp.einsum("bqhd,nhd->bhqn", q, keys)
    w = soft(jnp.concatenate([scores(q, k), of_bank], -1))
    y = jnp.einsum("bhqn,nhd->bqhd", w[..., T:], values)
    return mixed(w[..., :T], v) + y.reshape(B, T, D)


@heads("read", X, KEYS[0, :, 0], VALUES[0, :, 0])
def nearest_of_a_bank_beside_own_keys(q, k, v, keys, values):
    near, at = jax.lax.top_k(jnp.einsum("bqhd,nd->bhqn", q, keys), 2)
    w = soft(jnp.concatenate([scores(q, k), near], -1))
    y = jnp.einsum("bhqn,bhqnd->bqhd", w[..., T:], values[at])
    return mixed(w[..., :T], v) + y.reshape(B, T, D)


def _tiles(q, k, keys):
    return (noted(scores(q, x), layer="one", merge="largest") for x in (k, keys))


@heads("read", X, KEYS, VALUES)
def cache_in_a_tile_of_its_own(q, k, v, keys, values):
    tiles = tuple(_tiles(q, k, keys))
    tops = [tile.max(-1, keepdims=True) for tile in tiles]
    top = jnp.concatenate(tops, -1).max(-1, keepdims=True)
    e, f = (jnp.exp(tile - top) for tile in tiles)
    total = e.sum(-1, keepdims=True) + f.sum(-1, keepdims=True)
    return mixed(e / total, v) + mixed(f / total, values)


@heads("read", X, KEYS, VALUES)
def softmaxes_of_tiles_joined_by_logarithms(q, k, v, keys, values):
    a, b = _tiles(q, k, keys)
    sums = [jax.nn.logsumexp(tile, -1, keepdims=True) for tile in (a, b)]
    one, two = (jnp.exp(x - jnp.logaddexp(*sums)) for x in sums)
    own = mixed(jax.nn.softmax(a) * one, v)
    return own + mixed(jax.nn.softmax(b) * two, values)


BANK = weights(q=(D, D), o=(D, D), head=(D, 3))


@case("q o 0|1; head head", BANK, X, KEYS[0], VALUES[0], attention="read")
def bank_alone_for_all_examples(p, x, keys, values):
    w = soft(jnp.einsum("bqhd,nhd->bhqn", cut(x @ p["q"]), keys))
    y = jnp.einsum("bhqn,nhd->bqhd", w, values)
    return end(p, x, y.reshape(B, T, D))


@case("q o 0|1; head head", BANK, X, KEYS[0, :, 0], VALUES[0, :, 0], attention="read")
def nearest_of_a_bank_alone(p, x, keys, values):
    near, at = jax.lax.top_k(jnp.einsum("bqhd,nd->bqhn", cut(x @ p["q"]), keys), 2)
    w = jax.nn.softmax(noted(near, -2))
    y = jnp.einsum("bqhn,bqhnd->bqhd", w, values[at])
    return end(p, x, y.reshape(B, T, D))


# No keys: a table of codes, by which an expectation of numbers is taken.
@case("q any; o 0|1; head head", BANK, X, array("codes", D, N), array("levels", N))
def levels_of_a_table(p, x, codes, levels):
    y = jax.nn.softmax((x @ p["q"]) @ codes) @ levels
    return end(p, x, x * y[..., None])


# The softmax is over the features of nodes, and the basis goes over its frequencies.
@case("q o any; head head", BANK, X, array("basis", T, T), attention="none")
def features_of_frequencies(p, x, basis):
    features = jax.nn.softmax(jnp.einsum("fn,bnd->bfd", basis, x @ p["q"]))
    return end(p, x, jnp.einsum("fn,bfd->bnd", basis, features))


LAYERS = weights(**dict.fromkeys("qkvo", (2, D, D)), head=(D, 3))
CACHES = array("caches", 2, B, N, H, K, scale=4.0), array("old", 2, B, N, H, K)


@case("q k v o 1|2; head head", LAYERS, X, *CACHES, attention="read")
def caches_of_layers_that_a_loop_runs(p, x, keys, values):
    def layer(x, of):
        p, keys, values = of
        y = cache_before_own_keys(*qkv(p, x), keys, values)
        return jnp.tanh(x + y @ p["o"]), None

    layers = {name: p[name] for name in "qkvo"}
    return jax.lax.scan(layer, x, (layers, keys, values))[0] @ p["head"]
