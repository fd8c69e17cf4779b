"""Fused attention: read by its operands, recorded where its equation says the rest."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import are_unlike, few, first_that, naive_logits, normal, one_at_a_time
from internals import cudnn, largest_by_sums
from jax import export
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.extend.core import Primitive

import muonclip_jax as mc


B, T, D, H, DIM = 2, 128, 8, 4, 64
X = normal(3, B, T, D)
CAUSAL = np.tril(np.ones((T, T), bool))
SEGMENTS = np.repeat(np.arange(2), T // 2)[None].repeat(B, 0)
SAME = (SEGMENTS[:, :, None] == SEGMENTS[:, None])[:, None]


def draw(seed):
    return {
        name: normal((seed, i), D, H * DIM, scale=0.3) for i, name in enumerate("qkv")
    }


def grouped(p, key_heads=2):
    """The same with fewer heads of keys."""
    return {n: x[:, : key_heads * DIM] for n, x in p.items()} | {"q": p["q"]}


def heads(p, x):
    return [(x @ p[name]).reshape(*x.shape[:2], -1, DIM) for name in "qkv"]


def expected(p, mask=None):
    as_numbers = {name: np.asarray(y, np.float64) for name, y in p.items()}
    query, key, _ = heads(as_numbers, np.asarray(X, np.float64))
    key = np.repeat(key, query.shape[2] // key.shape[2], 2)
    return naive_logits(query, key, mask).max((0, 2, 3))


def distinguishes(p):
    """Whether each mask hides the largest logit of some head, and heads differ."""

    def hides(p, more, fewer=None):
        return not np.allclose(expected(p, more), expected(p, fewer), rtol=0.01)

    every = None, CAUSAL, SAME
    return (
        all(hides(p, mask) for mask in (CAUSAL, SAME))
        and all(hides(grouped(p), CAUSAL & SAME, mask) for mask in every)
        and all(are_unlike(expected(p, mask)) for mask in every)
    )


PARAMS = first_that(distinguishes, draw)
FLAT = {"ndim": 2, "axis": -2, "split": (H, DIM)}


def layer_of(loss, params=PARAMS):
    (layer,) = mc.read_model(loss, params, X).attention
    return layer


OURS = {
    "blockwise": mc.blockwise_attention,
    "splash": lambda *x, **o: mc.splash_attention(*x, interpret=True, **o),
}


@pytest.mark.parametrize("name", few(list(OURS), "blockwise"))
def test_this_packages_own_are_read_and_recorded(name):
    def loss(p, x):
        out, _ = OURS[name](*heads(p, x), is_causal=True)  # the statistic is dropped
        return jnp.sum(out**2)

    layer = layer_of(jax.jit(loss))
    query, key = (mc.HeadLeaf(name, **FLAT).owned((D, H * DIM)) for name in "qk")
    assert layer == mc.AttentionLayer("", (query,), (key,))
    value, stats = jax.jit(mc.record_attention(jax.checkpoint(loss)))(PARAMS, X)
    np.testing.assert_allclose(value, loss(PARAMS, X), rtol=1e-4)
    largest = expected(PARAMS, CAUSAL)
    np.testing.assert_allclose(stats["max_logits"], largest, rtol=1e-4)


def test_segments_of_splash_attention():
    pytest.importorskip("tokamax", reason="an extra, which has the kernel")

    def loss(p, x):
        ids = {"query_segment_ids": SEGMENTS, "key_segment_ids": SEGMENTS}
        return jnp.sum(OURS["splash"](*heads(p, x), **ids)[0] ** 2)

    assert [leaf.path for leaf in layer_of(loss).leaves] == ["q", "k"]
    stats = jax.jit(lambda p, x: mc.record_attention(loss)(p, x)[1])(PARAMS, X)
    np.testing.assert_allclose(stats["max_logits"], expected(PARAMS, SAME), rtol=1e-4)


def _splash_of_jax(key_heads, is_segmented, has_batch):
    """Its kernels have a name for each of these."""
    of_key = {1: splash_attention_kernel.make_splash_mqa}
    make = of_key.get(key_heads, splash_attention_kernel.make_splash_mha)
    mask = splash_attention_mask.CausalMask((T, T))
    masks = splash_attention_mask.MultiHeadMask([mask] * H)
    kernel = make(masks, head_shards=1, q_seq_shards=1, interpret=True)
    ids = splash_attention_kernel.SegmentIds(SEGMENTS[0], SEGMENTS[0])
    options = {"segment_ids": ids} if is_segmented else {}

    def loss(p, x):
        query, key, value = (y.swapaxes(1, 2) for y in heads(p, x))
        key, value = (y[:, 0] if key_heads == 1 else y for y in (key, value))
        if not has_batch:
            return jnp.sum(kernel(query[0], key[0], value[0]) ** 2)
        attend = jax.vmap(lambda *qkv: kernel(*qkv, **options))
        return jnp.sum(attend(query, key, value) ** 2)

    return loss


@pytest.mark.parametrize(
    ("key_heads", "is_segmented", "has_batch"),
    [(H, False, True), (2, True, True), (1, False, True), (H, False, False)],
)
def test_splash_attention_of_jax_under_all_names(key_heads, is_segmented, has_batch):
    loss = _splash_of_jax(key_heads, is_segmented, has_batch)
    layer = layer_of(loss, grouped(PARAMS, key_heads))
    assert [leaf.path for leaf in layer.leaves] == ["q", "k"]
    assert (layer.query[0].heads, layer.key[0].heads) == (H, key_heads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _copied(table, q, k, v, ids, mask_value):
    """As MaxText's copy of splash attention is called; what it computes is hidden."""
    return jax.pure_callback(
        lambda q, *_: np.asarray(q), q, q, k, v, table, ids, vmap_method="expand_dims"
    )


def _copied_forward(table, q, k, v, ids, mask_value):
    return _copied(table, q, k, v, ids, mask_value), (k, v)


def _copied_backward(mask_value, residuals, g):
    k, v = residuals
    return None, g, k + g.sum(), v + g.sum(), None


_copied.defvjp(_copied_forward, _copied_backward)


def test_a_kernel_of_pallas_that_nobody_taught_is_refused():
    def kernel(q, k, v, out):
        logits = jnp.dot(q[...], k[...].T)
        weights = jnp.exp(logits - logits.max(-1, keepdims=True))
        out[...] = jnp.dot(weights / weights.sum(-1, keepdims=True), v[...])

    def loss(p, x):
        query, key, value = (y[0, :, 0] for y in heads(p, x))
        call = pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
            interpret=True,
        )
        return jnp.sum(call(query, key, value))

    (refused,) = mc.read_model(loss, PARAMS, X).refused
    assert "which may be attention" in refused and "test_kernels_read.py" in refused


def test_a_copy_of_splash_attention_is_taught():
    """A table comes first, ids come last; heads before lengths, and no batch."""
    params = grouped(PARAMS)
    kernel = jax.vmap(lambda *x: _copied(jnp.arange(T), *x, -1e30))

    def loss(p, x):
        query, key, value = (y.swapaxes(1, 2) for y in heads(p, x))
        ids = (jnp.asarray(SEGMENTS),) * 2
        return jnp.sum(kernel(query * DIM**-0.5, key, value, ids) ** 2)

    assert "which may be attention" in mc.read_model(loss, params, X).refused[0]

    def operands(inputs):
        floats = [x for x in inputs if jnp.issubdtype(x.dtype, jnp.floating)]
        return [x.swapaxes(-2, -3) for x in floats[:3]]

    def plain(*inputs):
        return jax.nn.dot_product_attention(*operands(inputs)).swapaxes(-2, -3)

    def maxima(*inputs):
        ids = dict(query_segment_ids=inputs[-2], key_segment_ids=inputs[-1])
        return mc.max_logits(*operands(inputs)[:2], scale=1.0, is_causal=True, **ids)

    mc.attention_rule(plain, of=_copied)
    with pytest.raises(ValueError, match=r"give mc\.attention_rule .* maxima="):
        mc.record_attention(loss)(params, X)
    # The rule taught last counts, also where it names the kernel in another way.
    name = "_copied at test_kernels_read.py"
    mc.attention_rule(plain, of=name, maxima=maxima)
    layer = layer_of(loss, params)
    assert [leaf.path for leaf in layer.leaves] == ["q", "k"]
    assert layer.key[0].heads == 2
    recorded = jax.jit(jax.value_and_grad(mc.record_attention(loss), has_aux=True))
    (value, stats), grads = recorded(params, X)
    plain_value, plain_grads = jax.jit(jax.value_and_grad(loss))(params, X)
    assert value == plain_value
    for name, grad in grads.items():
        np.testing.assert_array_equal(grad, plain_grads[name])
    mask = CAUSAL & SAME
    largest = expected(params, mask)
    np.testing.assert_allclose(stats["max_logits"], largest, rtol=1e-4)
    tau = float(np.median(largest))
    clipped = mc.clip_qk(params, stats, tau, attention=[layer])
    after = expected(clipped, mask)
    np.testing.assert_allclose(after, np.minimum(largest, tau), rtol=1e-4)


def _plain(q, k, v):
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v)


def _hidden(q, k, v):
    return jax.pure_callback(lambda q, k, v: np.asarray(v), v, q, k, v)


def _shared_backward(residuals, g):
    return g, g, g


def _by_vjp(scale):
    @jax.custom_vjp
    def fused(q, k, v):
        return _hidden(q * scale, k, v)

    fused.defvjp(lambda q, k, v: (_hidden(q * scale, k, v), None), _shared_backward)
    return fused


def _by_jvp(scale):
    @jax.custom_jvp
    def fused(q, k, v):
        return _hidden(q * scale, k, v)

    fused.defjvp(lambda primals, tangents: (fused(*primals), scale * tangents[2]))
    return fused


def _by_jit(scale):
    return jax.jit(lambda q, k, v: _hidden(q * scale, k, v))


def _taught(kernel, scale):
    def maxima(q, k, v):
        return scale * jnp.einsum("bqhd,bkhd->bhqk", q, k).max((0, 2, 3))

    mc.attention_rule(_plain, of=kernel, maxima=maxima)
    return kernel


def _three_layers(kernels):
    def loss(p, x):
        for i, kernel in enumerate(kernels):
            around = (jax.jit, jax.checkpoint, lambda f: f)[i]
            out = around(kernel)(*heads({n: p[f"{n}{i}"] for n in "qkv"}, x))
            x = x + out.mean((2, 3))[..., None]
        return jnp.sum(x)

    return loss


LAYERS = {f"{n}{i}": normal((5, i), D, H * DIM) for n in "qkv" for i in range(3)}
LAYERS |= {f"q{i}": normal((6, i), D, H * DIM) for i in range(3)}


@pytest.mark.parametrize("made", [_by_vjp, _by_jvp])
def test_each_kernel_of_a_factory_has_its_own_rule(made):
    scales = 1.0, 0.1, 7.0
    kernels = [_taught(made(scale), scale) for scale in scales]
    x = X[:, :9]
    _, stats = mc.record_attention(_three_layers(kernels))(LAYERS, x)
    found = jax.tree.leaves(stats)
    assert len(found) == 3
    for i, scale in enumerate(scales):
        q, k, v = np.float64(heads({n: LAYERS[f"{n}{i}"] for n in "qkv"}, x))
        largest = scale * np.einsum("bqhd,bkhd->bhqk", q, k).max((0, 2, 3))
        assert any(np.allclose(row, largest, rtol=1e-4) for row in found), i
        x = x + v.mean((2, 3))[..., None]


@pytest.mark.parametrize("made", [_by_vjp, _by_jvp])
def test_a_rule_is_not_of_what_else_a_factory_makes(made):
    taught, other = _taught(made(1.0), 1.0), made(2.0)
    reading = mc.read_model(_three_layers([taught, other]), LAYERS, X)
    assert len(reading.attention) == 1
    (refused,) = reading.refused
    assert "which may be attention" in refused


def test_kernels_that_a_trace_cannot_tell_are_an_error():
    kernels = [_taught(_by_jit(scale), scale) for scale in (1.0, 2.0)]
    with pytest.raises(ValueError, match=r"cannot tell <lambda> at \S+_read.py"):
        mc.read_model(_three_layers(kernels), LAYERS, X)


def test_a_kernel_has_one_rule():
    kernel = _taught(_by_vjp(1.0), 1.0)
    with pytest.raises(ValueError, match="fused has a rule already"):
        _taught(kernel, 2.0)
    primitive, namesake = (Primitive("attend") for _ in range(2))
    _taught(primitive, 1.0)
    _taught(namesake, 1.0)
    with pytest.raises(ValueError, match="attend has a rule already"):
        _taught(primitive, 2.0)


@pytest.fixture
def on_gpu(monkeypatch):
    """cuDNN's attention is traced as on a GPU; without its output nothing runs it."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda _: False)


def shorter_than(lengths):
    return np.arange(T) < lengths[:, None, None, None]


# With one key more, some head has a larger logit.
LENGTHS = first_that(
    lambda n: (
        not any(
            np.allclose(*(expected(p, shorter_than(n + i)) for i in (0, 1)), rtol=0.05)
            for p in (PARAMS, grouped(PARAMS))
        )
    ),
    lambda seed: np.random.default_rng(seed).integers(1, 9, B, np.int32),
)
SEEN = np.arange(T)[:, None] - np.arange(T)
BIASED = {"bias": normal(5, 1, H, T, T, scale=100, dtype=jnp.bfloat16)}
MASKED = {"mask": (SEEN > 1)[None, None]}
CUDNN = {
    "plain": ({}, None),
    "causal": ({"is_causal": True}, SEEN >= 0),
    "window": (
        {"is_causal": True, "local_window_size": (3, 0)},
        (SEEN >= 0) & (SEEN <= 3),
    ),
    "biased": (BIASED, None),
    "masked": (MASKED, SEEN > 1),
    "biased and masked": (BIASED | MASKED, SEEN > 1),
    "padded": ({"key_value_seq_lengths": LENGTHS}, shorter_than(LENGTHS)),
}


def by_cudnn(p, x, **options):
    halves = (y.astype(jnp.bfloat16) for y in heads(p, x))
    out = jax.nn.dot_product_attention(*halves, implementation="cudnn", **options)
    return jnp.sum(out.astype(jnp.float32) ** 2)


@pytest.mark.parametrize("key_heads", [H, 2])
@pytest.mark.parametrize(
    "name", few(list(CUDNN), "window", "padded", "biased and masked")
)
def test_cudnn_by_its_equation(on_gpu, name, key_heads):
    options, mask = CUDNN[name]
    loss, params = functools.partial(by_cudnn, **options), grouped(PARAMS, key_heads)
    layer = layer_of(loss, params)
    assert [leaf.path for leaf in layer.leaves] == ["q", "k"]
    assert layer.key[0].heads == key_heads
    stats = jax.jit(lambda p, x: mc.record_attention(loss)(p, x)[1])(params, X)
    largest = expected(params, mask)
    np.testing.assert_allclose(stats["max_logits"], largest, rtol=2e-2)


def test_on_a_gpu_cudnn_itself_has_the_largest_logits(on_gpu):
    """A second call of its forward kernel, and no logits."""
    gradient = jax.value_and_grad(mc.record_attention(by_cudnn), has_aux=True)
    lowered = jax.jit(gradient).trace(PARAMS, X).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count('@"__cudnn$fmhaSoftmax"') + text.count("fmhaSoftmax(") == 2
    assert f"{T}x{T}x" not in text


def _log_sums(key, rounding):
    """As a flash kernel: exponents of base 2, the largest of a row rounded apart."""

    def log_sums(query, scale):
        raw = np.einsum("bthd,bshd->bhts", *map(np.float64, (query, key)))
        exponents = raw * scale / np.log(2)
        largest = exponents.max(-1, keepdims=True)
        away = rounding * 2.0**-24 * np.abs(largest)
        sums = np.exp2(exponents - largest + away).sum(-1)
        return jnp.asarray((largest[..., 0] + np.log2(sums)) * np.log(2), jnp.float32)

    return log_sums


@pytest.mark.parametrize(
    "size, dtype, rounding",
    one_at_a_time([0.0, 1e-4, 1.0, 30.0], ["bfloat16", "float16"], [-1, 1]),
)
def test_largest_logits_from_sums_of_exponentials(size, dtype, rounding):
    query = size * normal(1, 2, 16, H, DIM)
    query, key = (jnp.asarray(x, dtype) for x in (query, normal(2, 2, 16, H, DIM)))
    found = largest_by_sums(_log_sums(key, rounding), query, key, 0.25, 2)
    raw = np.einsum("bthd,bshd->bhts", *map(np.float64, (query, key)))
    exact = 0.25 * raw.max((0, 2, 3))
    # The rounded exponent moves a sum by a quarter, and 16 keys by log(16) at most.
    norms = [np.linalg.norm(np.float64(x), axis=-1).max() for x in (query, key)]
    bound = max(0.25 * math.prod(norms), 2.0**-14)
    most = bound * (0.25 + math.log(16)) * 2.0**-21
    assert (np.abs(found - exact) <= most + 1e-6 * np.abs(exact)).all()


def test_a_logit_that_is_no_number_is_seen_in_sums():
    query, key = (jnp.asarray(normal(i, 1, 8, H, DIM), "bfloat16") for i in (1, 2))
    query = query.at[0, 3, 1].set(jnp.nan)
    found = largest_by_sums(_log_sums(key, 0), query, key, 0.25, 2)
    assert np.isnan(found).tolist() == [i == 1 for i in range(H)]


def _of_jax(p, x):
    swapped = (y.swapaxes(1, 2) for y in heads(p, x))
    return jnp.sum(flash_attention.flash_attention(*swapped, causal=True) ** 2)


def test_a_kernel_that_keeps_its_logits_is_read_and_not_recorded():
    assert [leaf.path for leaf in layer_of(_of_jax).leaves] == ["q", "k"]
    line = _of_jax.__code__.co_firstlineno + 2
    with pytest.raises(ValueError, match=f"test_kernels_read.py:{line} cannot be reco"):
        mc.record_attention(_of_jax)(PARAMS, X)


def test_an_operation_that_may_hide_attention_is_an_error_unless_told():
    def loss(p, x):
        query, key, _ = heads(p, x)
        shape = jax.ShapeDtypeStruct(query.shape, query.dtype)
        return jax.pure_callback(lambda q, k: q, shape, query, key).sum()

    with pytest.raises(ValueError, match=r"pure_callback at test_kernels_read.py:\d+"):
        mc.record_attention(loss)(PARAMS, X)
    value, stats = mc.record_attention(loss, strict=False)(PARAMS, X)
    assert stats == {} and value == pytest.approx(float(loss(PARAMS, X)))


def test_a_model_that_was_exported_may_hold_attention():
    params = {"query": normal(0, 8, 2, 4), "key": normal(1, 8, 2, 4)}
    x = normal(2, 5, 8)

    def loss(params, x):
        q, k = (jnp.einsum("td,dhk->htk", x, w) for w in params.values())
        return jnp.sum(jax.nn.softmax(q @ k.mT) @ x)

    exported = export.export(jax.jit(loss))(params, x)

    def called(params, x):
        return exported.call(params, x)

    reading = mc.read_model(called, params, x)
    with pytest.raises(ValueError, match=r"call_exported at test_kernels_read.py:\d+"):
        mc.muonclip(0.1, model=reading).init(params)
