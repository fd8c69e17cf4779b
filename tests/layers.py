"""Attention layers described by hand, in layouts that names do not tell."""

import muonclip_jax as mc


def flat_layer(path, head_dim, query="q_proj", key="k_proj", bias=False, stack_axis=0):
    """Dense kernels of `(features, heads * head_dim)`."""
    where = {"split": (-1, head_dim), "stack_axis": stack_axis}

    def leaves(name):
        kernel = mc.HeadLeaf(f"{name}/kernel", 2, **where)
        return (kernel, mc.HeadLeaf(f"{name}/bias", 1, **where))[: 1 + bias]

    return mc.AttentionLayer(path, leaves(query), leaves(key))


def fused_layer(path, head_dim, name="c_attn", bias=False, stack_axis=0):
    """One Dense of `(features, 3 * heads * head_dim)`, all queries first, as GPT-2."""
    where = {"split": (3, -1, head_dim), "stack_axis": stack_axis}

    def leaves(third):
        part = (-3, slice(third, third + 1))
        kernel = mc.HeadLeaf(f"{name}/kernel", 2, part=part, **where)
        return (kernel, mc.HeadLeaf(f"{name}/bias", 1, part=part, **where))[: 1 + bias]

    return mc.AttentionLayer(path, leaves(0), leaves(1))


def latent_layer(path, nope, query="wq_b/kernel", key="wkv_b/kernel", stack_axis=0):
    """DeepSeek's: `nope` features of each head first, then rotary ones, or values."""
    first, rest = (-1, slice(0, nope)), (-1, slice(nope, None))
    return mc.AttentionLayer(
        path,
        query=(mc.HeadLeaf(query, 3, part=first, stack_axis=stack_axis),),
        key=(mc.HeadLeaf(key, 3, part=first, stack_axis=stack_axis),),
        rotary_query=(mc.HeadLeaf(query, 3, part=rest, stack_axis=stack_axis),),
    )


def gains_layer(path, query=("query_ln/scale",), key=("key_ln/scale",), stack_axis=0):
    """The gains of QK-norm, which all heads share, and shifts if there are any."""

    def leaves(names):
        return tuple(mc.HeadLeaf(x, 1, axis=None, stack_axis=stack_axis) for x in names)

    return mc.AttentionLayer(path, leaves(query), leaves(key))
