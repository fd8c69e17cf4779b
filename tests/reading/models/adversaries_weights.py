"""Parameters that are matrices, or look like them: what activations do with them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from pieces_of_cases import (
    array,
    attend,
    B,
    C,
    case,
    cut,
    D,
    F,
    gains,
    K,
    KEY,
    network,
    one_layer,
    T,
    V,
    weights,
    X,
)


TOKENS = jnp.arange(B * T).reshape(B, T) % V


# Diagonal parameters of state-space layers: each channel has its own.


def _by_fft(window, x):
    n = 2 * x.shape[1]
    product = jnp.fft.rfft(x, n, axis=1) * jnp.fft.rfft(window, n, axis=0)
    return jnp.fft.irfft(product, n, axis=1)[:, : x.shape[1]]


DIAGONAL = weights(re=(D, K), im=(D, K), c=(D, K, 2), mix=(D, F), head=(F, C))
SAYS_DIAGONAL = "re im c vector; mix 0|1; head head"


@case(SAYS_DIAGONAL, DIAGONAL)
def window_of_complex_states(p, x):
    """S4D (arXiv:2206.11893): the states are summed over, with no activation."""
    rates = -jnp.exp(p["re"]) + 1j * p["im"]
    c = jax.lax.complex(*jnp.moveaxis(p["c"], -1, 0))
    powers = jnp.exp(rates[..., None] * jnp.arange(T))
    window = 2 * jnp.einsum("dn,dnt->td", c / rates, powers).real
    return jax.nn.gelu(_by_fft(window, x) @ p["mix"]) @ p["head"]


@case(SAYS_DIAGONAL, DIAGONAL)
def toeplitz_matrices_of_states(p, x):
    """Activations are contracted with positions, along which no parameter is."""
    lags = jnp.arange(T)[:, None] - jnp.arange(T)
    decays = jnp.exp(-jnp.exp(p["re"])[..., None, None] * jnp.abs(lags))
    made = jnp.einsum("dn,dnts->dts", p["c"][..., 0] + p["im"], decays)
    y = jnp.einsum("dts,bsd->btd", jnp.where(lags < 0, 0, made), x)
    return jax.nn.gelu(y @ p["mix"]) @ p["head"]


@network("rates vector; b c 1|0", rates=(K,), b=(K, D), c=(F, K), head=(F, C))
def full_matrices_around_diagonal_states(p, x):
    """S5 as a convolution, which mixes inputs and outputs."""
    powers = jnp.exp(-jnp.exp(p["rates"])[:, None] * jnp.arange(T))
    kernel = jnp.einsum("dn,nt,ni->tdi", p["c"], powers, p["b"])
    padded = jnp.pad(x, ((0, 0), (T - 1, 0), (0, 0)))
    dims = ("NWC", "WOI", "NWC")
    y = jax.lax.conv_general_dilated(
        padded, kernel[::-1], (1,), "VALID", dimension_numbers=dims
    )
    return jax.nn.gelu(y) @ p["head"]


# Kernels that activations scale or mix.

STYLE = X[:, 0]


def _conv(x, kernel):
    dims = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(
        x[None], kernel, (1,), "SAME", dimension_numbers=dims
    )[0]


MODULATED = weights(w=(3, D, F), style=(D, D), head=(F, C))


@case("w 01|2; style 0|1; head head", MODULATED, X, STYLE)
def kernel_with_a_style_for_each_example(p, x, z):
    """StyleGAN 2: what it demodulates by depends on the kernel, too."""
    w = p["w"] * (1 + z @ p["style"])[:, None, :, None]
    w = w * jax.lax.rsqrt(jnp.square(w).sum((1, 2), keepdims=True) + 1e-6)
    return jax.nn.gelu(jax.vmap(_conv)(x, w)) @ p["head"]


@case("w 01|2; head head", {n: MODULATED[n] for n in ("w", "head")}, X, STYLE)
def kernel_with_a_style_among_the_arguments(p, x, z):
    return jax.nn.gelu(jax.vmap(_conv)(x, p["w"] * z[:, None, :, None])) @ p["head"]


@case(
    "one two 1|0; gate vector; out 0|1; head head",
    weights(one=(F, D), two=(F, D), gate=(D, 1), out=(D, F), head=(F, C)),
    X,
    STYLE,
)
def kernels_joined_by_a_gate(p, x, z):
    gate = jax.nn.sigmoid(z @ p["gate"])[..., None]
    outputs = jax.nn.sigmoid(z @ p["out"])[:, :, None]
    kernel = (p["one"] * gate + p["two"] * (1 - gate)) * outputs
    return jax.nn.gelu(jnp.einsum("bti,boi->bto", x, kernel)) @ p["head"]


MIXED = weights(w=(4, D, F), route=(D, 4), head=(F, C))
SAYS_MIXED = "w 1|2; route router; head head"


@case(SAYS_MIXED, MIXED, X, STYLE)
def kernels_mixed_by_a_softmax(p, x, z):
    """Dynamic convolution (arXiv:1912.03458)."""
    kernel = jnp.einsum("be,eio->bio", jax.nn.softmax(z @ p["route"]), p["w"])
    return jax.nn.gelu(jnp.einsum("bti,bio->bto", x, kernel)) @ p["head"]


@case(SAYS_MIXED, MIXED, X, STYLE)
def kernels_mixed_by_multiply_and_sum(p, x, z):
    kernel = (jax.nn.softmax(z @ p["route"])[..., None, None] * p["w"]).sum(1)
    return jax.nn.gelu(jnp.einsum("bti,bio->bto", x, kernel)) @ p["head"]


@network("inner style 0|1", X, STYLE, inner=(D, D), style=(D, D))
def scaled_kernel_that_writes_the_output(p, x, z):
    head = p["head"] * (z @ p["style"])[..., None]
    return jnp.einsum("btd,bdc->btc", jnp.tanh(x @ p["inner"]), head)


@case(
    "places gains gate vector; key 0|1; head head",
    weights(places=(T, D), gains=(3, D // 3), key=(D, D), gate=(D, 1), head=(D, C)),
    X,
    STYLE,
    attention="maybe",
)
def gains_and_positions_of_a_product_without_a_softmax(p, x, z):
    q = x + p["places"] * jax.nn.sigmoid(z @ p["gate"])[..., None]
    k = cut(x @ p["key"]) * p["gains"]
    made = jnp.einsum("bqhd,bkhd->bqk", cut(q), k)
    return jax.nn.gelu(jnp.tanh(made) @ x) @ p["head"]


# Activations that are cut by their order.

CUT = weights(inner=(D, D), up=(D, F), gate=(D, F), down=(F, D), head=(D, C))
SAYS_CUT = "inner up gate down 0|1; head head"


def _winners(p, x, kept):
    x = jax.nn.gelu(x @ p["inner"])
    return jax.nn.gelu(x + kept(x @ p["up"], x @ p["gate"]) @ p["down"]) @ p["head"]


@case(SAYS_CUT, CUT)
def largest_of_a_gated_layer(p, x):
    def kept(y, gate):
        y = jax.nn.silu(gate) * y
        least = jax.lax.stop_gradient(jax.lax.top_k(jnp.abs(y), 5)[0][..., -1:])
        return jnp.where(jnp.abs(y) >= least, y, 0)

    return _winners(p, x, kept)


@case(SAYS_CUT, CUT)
def largest_put_back_where_they_were(p, x):
    def one(y):
        largest, at = jax.lax.top_k(y, 5)
        return jnp.zeros_like(y).at[at].set(jax.nn.relu(largest))

    def kept(y, gate):
        return jax.vmap(jax.vmap(one))(jax.nn.silu(gate) * y)

    return _winners(p, x, kept)


@case("gate vector; " + SAYS_CUT, CUT | {"gate": array("gains", F)})
def winners_of_groups_by_their_order(p, x):
    def kept(y):
        groups = y.reshape(*y.shape[:-1], -1, 4)
        least = jnp.sort(groups, -1)[..., -2:-1]
        return jnp.where(groups >= least, groups, 0).reshape(y.shape) * p["gate"]

    x = jax.nn.gelu(x @ p["inner"])
    return jax.nn.gelu(x + kept(x @ p["up"]) @ p["down"]) @ p["head"]


@network("router router; wi wo 1|2", router=(D, 4), wi=(4, D, F), wo=(4, F, D))
def experts_weighed_before_and_after_by_what_is_left(p, x):
    """What cuts the outputs of this kernel cuts nothing but the choice of experts."""
    logits = x @ p["router"]
    gates = jax.nn.sigmoid(logits)
    gates = jnp.where(logits >= jax.lax.top_k(logits, 2)[0][..., -1:], gates, 0)
    y = jnp.einsum("btd,edf,bte->btef", x, p["wi"], gates)
    y = jnp.einsum("btef,efd,bte->btd", jax.nn.gelu(y), p["wo"], gates)
    return jax.nn.gelu(x + y) @ p["head"]


# Parameters without a gradient: the judge compares with their numbers.

CHOOSES = weights(a=(D, K), code=(16, D), up=(D, F), head=(F, C))
SAYS_CHOOSES = "a frozen; code embedding; up 0|1; head head"


@case(SAYS_CHOOSES, CHOOSES)
def buckets_by_signs(p, x):
    signs = (jnp.sign(x @ p["a"]) + 1) / 2
    at = (signs @ 2.0 ** jnp.arange(K)).astype(int)
    return jax.nn.gelu((x + p["code"][at]) @ p["up"]) @ p["head"]


@case(SAYS_CHOOSES, CHOOSES)
def code_by_a_choice_in_a_loop(p, x):
    def step(h, y):
        at = jax.lax.top_k(y @ p["a"], 2)[1]
        return jnp.tanh(h + p["code"][at].sum(-2)), h

    _, y = jax.lax.scan(step, jnp.zeros((B, D)), x.swapaxes(0, 1))
    return jax.nn.gelu((x + y.swapaxes(0, 1)) @ p["up"]) @ p["head"], (y > 0).sum()


@case(SAYS_CHOOSES.replace("a frozen", "a router"), CHOOSES)
def code_by_a_choice_that_also_weighs(p, x):
    gates = jax.nn.softmax(x @ p["a"])
    code = p["code"][gates.argmax(-1)] * gates.max(-1, keepdims=True)
    return jax.nn.gelu((x + code) @ p["up"]) @ p["head"]


@jax.custom_vjp
def _rounded(x):
    return jnp.round(4 * x) / 4


_rounded.defvjp(lambda x: (_rounded(x), None), lambda _, g: (g,))


@network("a up 0|1; back frozen", a=(D, K), back=(K, D), up=(K, F), head=(F, C))
def rounded_with_a_gradient_and_without(p, x):
    y = _rounded(x @ p["a"])
    less = jnp.floor(x @ p["back"].T)
    return jax.nn.gelu((y + less) @ p["up"]) @ p["head"]


@case(
    "table embedding; up 0|1; head 0|1~head",
    weights(table=(V, D), up=(D, F), head=(F, V)),
    TOKENS,
)
def tokens_that_are_generated(p, tokens):
    """No gradient shows what is trained, so nothing is frozen."""
    return (jax.nn.gelu(p["table"][tokens] @ p["up"]) @ p["head"]).argmax(-1)


# Tables whose rows a router mixes.

TABLES = weights(table=(V, D), tables=(3, V, D), route=(D, 3), head=(D, C))
SAYS_TABLES = "table tables embedding; route router; head head"


def _with_rows(p, tokens, rows):
    x = p["table"][tokens]
    return jax.nn.gelu(x + rows(jax.nn.softmax(x @ p["route"]))) @ p["head"]


@case(SAYS_TABLES, TABLES, TOKENS)
def tables_mixed_for_each_token(p, tokens):
    def one(token, weights):
        return weights @ p["tables"][:, token]

    return _with_rows(p, tokens, lambda w: jax.vmap(jax.vmap(one))(tokens, w))


@case(SAYS_TABLES, TABLES, TOKENS)
def tables_of_which_the_best_two_are_mixed(p, tokens):
    def rows(w):
        largest, at = jax.lax.top_k(w, 2)
        picked = p["tables"][at, tokens[..., None]]
        return (largest[..., None] * picked).sum(-2)

    return _with_rows(p, tokens, rows)


@case(
    "table embedding; tables 1|2; route any; head head",
    TABLES | weights(tables=(V, D, D)),
    TOKENS,
)
def matrix_for_each_token(p, tokens):
    def rows(w):
        y = jnp.einsum("btd,btdf->btf", p["table"][tokens], p["tables"][tokens])
        return y * w.max(-1, keepdims=True)

    return _with_rows(p, tokens, rows)


# Kernels that meet data, noise, masks or one another before activations.


MLP = weights(up=(D, F), down=(F, D), head=(D, C))
MASK = np.asarray(np.arange(D)[:, None] % 2 * np.ones(F), np.float32)
SAYS_MLP = "up down 0|1; head head"


def mlp(p, x, up, down=None):
    down = p["down"] if down is None else down
    return (x + jax.nn.gelu(x @ up) @ down) @ p["head"]


@case(SAYS_MLP, MLP, X, MASK)
def mask_among_the_arguments(p, x, mask):
    return mlp(p, x, jnp.where(mask > 0, p["up"], 0))


@case(SAYS_MLP, MLP, X, KEY)
def dropped_connections(p, x, key):
    key = jax.random.wrap_key_data(key)
    keep = jax.random.bernoulli(key, 0.7, (D, F))
    return mlp(p, x, jnp.where(keep, p["up"] / 0.7, 0))


@case(SAYS_MLP, MLP, X, {"up": array("t", D, F), "down": array("u", F, D)})
def averages_of_all_as_a_teacher(p, x, teacher):
    return mlp(p, x, p["up"]), mlp({**p, **teacher}, x, teacher["up"])


@case(SAYS_MLP, MLP)
def signs_with_a_mean_size(p, x):
    def ternary(w):
        size = jnp.mean(jnp.abs(w))
        low = jnp.clip(jnp.round(w / size), -1, 1) * size
        return w + jax.lax.stop_gradient(low - w)

    return mlp(p, x, ternary(p["up"]))


class _Float8(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(D, name="mix", use_bias=False, dot_general_cls=nn.Fp8DotGeneralOp)
        return nn.Dense(C, name="head", use_bias=False)(x + y(x))


def flax_of_eight_bits(p, rest, x):
    return _Float8().apply({"params": p, **rest}, x)


_FLOAT8 = jax.eval_shape(_Float8().init, jax.random.key(0), X)
case(
    "mix/kernel 0|1; head/kernel head",
    {"mix": {"kernel": array("mix", D, D)}, "head": {"kernel": array("head", D, C)}},
    jax.tree.map(  # scales and the largest entries so far
        lambda x: np.ones(x.shape, x.dtype),
        {k: v for k, v in _FLOAT8.items() if k != "params"},
    ),
    X,
)(flax_of_eight_bits)


@case(SAYS_MLP, MLP, X, array("u", D), array("w", F))
def spectral_norm_by_vectors_among_the_arguments(p, x, u, w):
    return mlp(p, x, p["up"] / jnp.einsum("d,df,f->", u, p["up"], w))


@case(SAYS_MLP + "; gain vector", {**MLP, "gain": gains(F)})
def weight_norm(p, x):
    up = p["up"] / jnp.linalg.norm(p["up"], axis=0, keepdims=True)
    return mlp(p, x, up * p["gain"])


@case(
    SAYS_MLP + "; a b 0|1; gain vector",
    {**MLP, **weights(a=(D, 2), b=(2, F)), "gain": gains(F)},
)
def low_rank_with_a_gain(p, x):
    w = p["up"] + p["a"] @ p["b"]
    return mlp(p, x, p["gain"] * w / jnp.linalg.norm(w, axis=0))


@network("a b 0|1", X, array("base", D, D), a=(D, 2), b=(2, D))
def adapters_alone_on_a_kernel_of_the_arguments(p, x, base):
    return (x + jax.nn.gelu(x @ (base + p["a"] @ p["b"]))) @ p["head"]


@network("blocks 1|2; down 0|1", blocks=(3, 4, 8), down=(24, D))
def block_diagonal(p, x):
    y = jnp.einsum("btnd,ndf->btnf", x.reshape(B, T, 3, 4), p["blocks"])
    return (x + jax.nn.gelu(y.reshape(B, T, 24)) @ p["down"]) @ p["head"]


@case(
    "up 1|2; down 1|2; head 1|2~head",
    weights(up=(2, D, F), down=(2, F, D), head=(2, D, C)),
)
def an_ensemble_by_vmap(p, x):
    return jax.vmap(lambda p: mlp(p, x, p["up"]))(p)


# Attention whose kernels meet data.


def _attended(p, x, q, k):
    y = attend(cut(x @ q), cut(x @ k), cut(x @ p["v"]))
    return (x + y @ p["o"]) @ p["head"]


@one_layer("said", X, array("b", D, D), array("c", D, D))
def both_with_kernels_of_the_arguments_added(p, x, b, c):
    return _attended(p, x, p["q"] + b, p["k"] + c)


@one_layer("read", also="q_gain vector", q_gain=gains(D))
def query_by_weight_norm(p, x):
    q = p["q_gain"] * p["q"] / jnp.linalg.norm(p["q"], axis=0)
    return _attended(p, x, q, p["k"] / jnp.linalg.norm(p["k"], axis=0))


@one_layer(
    "said",
    also="q k frozen; *_a *_b 0|1",
    **dict.fromkeys(("q_a", "k_a"), (D, 2)),
    **dict.fromkeys(("q_b", "k_b"), (2, D)),
)
def adapters_of_frozen_query_and_key(p, x):
    q, k = (jax.lax.stop_gradient(p[n]) + p[n + "_a"] @ p[n + "_b"] for n in "qk")
    return _attended(p, x, q, k)
