"""Every attention in use, as small Linen modules that sow their largest logits."""

import flax.linen as nn
import jax
import jax.numpy as jnp

import muonclip_jax as mc


WIDTH, HEADS, HEAD_DIM = 16, 4, 8


def rotate(x):
    """Rotary embedding over the last axis of `(batch, length, heads, dim)`."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] / 10.0 ** jnp.arange(half)
    a, b = x[..., :half], x[..., half:]
    turned = (
        a * jnp.cos(angle) - b * jnp.sin(angle),
        a * jnp.sin(angle) + b * jnp.cos(angle),
    )
    return jnp.concatenate(turned, axis=-1)


class Recorder(nn.Module):
    """Attention that sows its statistic; what it returns stays out of the residual."""

    def attend(self, x, query, key, scale=None):
        """Returns `x`, to which attention adds nothing, so that every layer sees it."""
        options = {"is_causal": True, "scale": scale}
        self.sow("intermediates", "max_logits", mc.max_logits(query, key, **options))
        y = jax.nn.dot_product_attention(query, key, key, **options)
        return x + 0 * y.mean((-2, -1))[..., None]


class LatentAttention(Recorder):
    """DeepSeek-V3's attention in MaxText's names."""

    nope: int = 4
    rope: int = 2

    @nn.compact
    def __call__(self, x):
        def up(name, dim):
            return nn.DenseGeneral((HEADS, dim), use_bias=False, name=name)

        low = nn.RMSNorm(name="q_norm")(nn.Dense(6, name="wq_a")(x))
        query = up("wq_b", self.nope + self.rope)(low)
        low, rope_key = jnp.split(
            nn.Dense(6 + self.rope, name="wkv_a")(x), [6], axis=-1
        )
        key_value = up("wkv_b", self.nope + 3)(nn.RMSNorm(name="kv_norm")(low))
        query = jnp.concatenate(
            [query[..., : self.nope], rotate(query[..., self.nope :])], -1
        )
        shared = jnp.broadcast_to(
            rotate(rope_key[:, :, None]), (*query.shape[:-1], self.rope)
        )
        key = jnp.concatenate([key_value[..., : self.nope], shared], axis=-1)
        return self.attend(x, query, key, scale=0.3)


class FusedAttention(Recorder):
    @nn.compact
    def __call__(self, x):
        qkv = nn.Dense(3 * HEADS * HEAD_DIM, name="c_attn")(x)
        query, key, _ = jnp.moveaxis(
            qkv.reshape(*x.shape[:2], 3, HEADS, HEAD_DIM), 2, 0
        )
        return self.attend(x, query, key)


class FlatAttention(Recorder):
    key_heads: int = HEADS

    @nn.compact
    def __call__(self, x):
        query = nn.Dense(HEADS * HEAD_DIM, name="q_proj")(x)
        key = nn.Dense(self.key_heads * HEAD_DIM, name="k_proj")(x)

        def heads(y):
            return rotate(y.reshape(*y.shape[:2], -1, HEAD_DIM))

        return self.attend(x, heads(query), heads(key))


class GemmaAttention(Recorder):
    """Heads first, and key and value in one kernel."""

    @nn.compact
    def __call__(self, x):
        normal = nn.initializers.normal()
        wq = self.param("q_einsum", normal, (HEADS, WIDTH, HEAD_DIM))
        wkv = self.param("kv_einsum", normal, (2, HEADS, WIDTH, HEAD_DIM))
        query, key = (jnp.einsum("btd,ndh->btnh", x, w) for w in (wq, wkv[0]))
        return self.attend(x, query, key)


GEMMA = mc.AttentionLayer(
    "",
    query=(mc.HeadLeaf("q_einsum", 3, -3),),
    key=(mc.HeadLeaf("kv_einsum", 4, -3, part=(-4, slice(0, 1))),),
)


class StockAttention(nn.Module):
    """Flax's own, here as cross-attention with a padding mask."""

    @nn.compact
    def __call__(self, x):
        memory = x[:, ::-1, :] * jnp.linspace(0.5, 2, x.shape[1])[:, None]
        mask = nn.make_attention_mask(jnp.ones(x.shape[:2]), jnp.arange(x.shape[1]) < 4)
        layer = nn.MultiHeadDotProductAttention(HEADS, attention_fn=mc.attention_fn)
        y = layer(x, memory, mask=mask, sow_weights=True)
        return x + 0 * y


class Stacked(nn.Module):
    """Any of them, scanned; the stack axis of the params is free."""

    layer: type
    options: tuple = ()
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        layer = self.layer(**dict(self.options), name="layers")
        scanned = nn.scan(
            lambda layer, x, _: (layer(x), None),
            variable_axes={"params": self.axis, "intermediates": 0},
            split_rngs={"params": True},
            length=3,
        )
        return scanned(layer, x, None)[0]


CASES = {
    "latent": LatentAttention(),
    "latent, scanned": Stacked(LatentAttention),
    "fused": FusedAttention(),
    "flat, rotary": FlatAttention(),
    "flat, grouped queries": FlatAttention(key_heads=2),
    "flat, multi-query, scanned": Stacked(FlatAttention, (("key_heads", 1),)),
    "Gemma": GemmaAttention(),
    "cross-attention": StockAttention(),
    "flat multi-query, stacked at axis 1": Stacked(
        FlatAttention, (("key_heads", 1),), axis=1
    ),
}
