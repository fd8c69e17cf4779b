"""A router's kernel is one in every layer, however its tokens reach the experts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import few
from jax.nn import softmax
from jax.sharding import PartitionSpec as P
from written_out import normed

import muonclip_jax as mc


# Batch, length, width, experts, experts of a token, hidden width, words, capacity.
B, T, D, E, K, F, V, C = 2, 8, 6, 4, 2, 10, 12, 5
N = B * T

FORMS: dict[str, Any] = {}


def forms(**variants: dict[str, Any]):
    """Registers a mixture of experts `form(params, x)` with these arguments."""

    def register(form):
        for name, arguments in variants.items():
            said = f"{form.__name__}: {name}".replace("_", " ")
            FORMS[said] = functools.partial(form, **arguments)
        return form

    return register


def applied(p, x):
    """The experts, each to its own rows of an array of experts, slots and features."""
    hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", x, p["wi"]))
    return jnp.einsum("ecf,efd->ecd", hidden, p["wo"])


def one_hot(index, size, dtype=jnp.float32):
    return jax.nn.one_hot(index, size, dtype=dtype)


# By products with one-hot rows, each expert with slots for some tokens.


@forms(
    summed={},
    summed_and_int={"counts": "int32"},
    largest={"gate": "max"},
    taken={"gate": "take"},
    stopped={"how": "stopped"},
    by_the_combination={"how": "combination"},
    gate_after_the_experts={"how": "after"},
    jitter_and_losses={"noise": True, "losses": True},
    largest_with_losses={"gate": "max", "losses": True},
    sigmoid={"score": jax.nn.sigmoid},
)
def switch(
    p, x, gate="sum", counts="float32", how="", noise=False, losses=False, score=softmax
):
    """Switch Transformer (arXiv:2101.03961), a capacity and one expert for a token."""
    x = x.reshape(N, D)
    seen = x
    if noise:
        uniform = jax.random.uniform(jax.random.key(0), x.shape)
        seen = x * (0.99 + 0.02 * uniform)
    logits = (seen @ p["router"]).astype(jnp.float32)
    scores = score(logits)
    index = jnp.argmax(scores, -1)
    rows = one_hot(index, E)
    gates = {
        "sum": lambda: (scores * rows).sum(-1),
        "max": lambda: scores.max(-1),
        "take": lambda: jnp.take_along_axis(scores, index[:, None], -1)[:, 0],
    }[gate]()
    counted = rows.astype(counts)
    slot = (jnp.cumsum(counted, 0) * counted).sum(-1) - 1
    dispatch = rows[..., None] * one_hot(slot.astype(int), C)[:, None]
    if how == "stopped":
        dispatch = jax.lax.stop_gradient(dispatch)
    combine = gates[:, None, None] * dispatch
    if how == "combination":
        dispatch = (combine > 0).astype(x.dtype)
    y = applied(p, jnp.einsum("tec,td->ecd", dispatch, x).astype(x.dtype))
    if how == "after":
        y = jnp.einsum("tec,ecd->td", dispatch, y) * gates[:, None]
    else:
        y = jnp.einsum("tec,ecd->td", combine, y)
    loss = E * (scores.mean(0) * rows.mean(0)).sum()
    loss += jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
    return y.reshape(B, T, D), loss if losses else 0.0


@forms(
    renormalized={"divided": True},
    as_they_are={},
    losses={"losses": True},
    stopped={"stopped": True},
)
def several_of_top_k(p, x, divided=False, losses=False, stopped=False):
    """Slots for the best two, with the places of all of them in one running sum."""
    scores = softmax((x @ p["router"]).astype(jnp.float32))
    gates, index = jax.lax.top_k(scores, K)
    if divided:
        gates = gates / gates.sum(-1, keepdims=True)
    rows = one_hot(index, E)
    slot = jnp.cumsum(rows.reshape(B, T * K, E), 1).reshape(rows.shape) * rows - 1
    is_kept = (slot >= 0) & (slot < C)
    slots = one_hot(jnp.where(is_kept, slot, -1).astype(int), C) * is_kept[..., None]
    if stopped:
        slots = jax.lax.stop_gradient(slots)
    combine = (slots * gates[..., None, None]).sum(2)
    inputs = jnp.einsum("btec,btd->ebcd", slots.sum(2), x)
    hidden = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", inputs, p["wi"]))
    y = jnp.einsum("ebcf,efd->ebcd", hidden, p["wo"])
    if "bias" in p:
        y = y + p["bias"][:, None, None]
    y = jnp.einsum("btec,ebcd->btd", combine, y)
    loss = E * jnp.sum(rows.mean((0, 1)).sum(0) * scores.mean((0, 1)))
    return y, loss if losses else 0.0


@forms(all={}, random={"is_random": True})
def gshard(p, x, is_random=False):
    """The best, and the second best of the rest (arXiv:2006.16668)."""
    scores = softmax(jnp.einsum("gsm,me->gse", x, p["router"]))
    one = one_hot(jnp.argmax(scores, -1), E)
    two = one_hot(jnp.argmax(scores * (1 - one), -1), E)
    first, second = (jnp.einsum("gse,gse->gs", scores, rows) for rows in (one, two))
    both = first + second + 1e-9
    first, second = first / both, second / both
    if is_random:
        drawn = jax.random.uniform(jax.random.key(1), second.shape)
        two = two * (drawn < 2 * second)[..., None]
    place = (jnp.cumsum(one, 1) - one) * one
    one = one * (place < C)
    later = (jnp.cumsum(two, 1) - two + one.sum(1, keepdims=True)) * two
    two = two * (later < C)
    combine = sum(
        jnp.einsum("gs,gse,gsc->gsec", gate, rows, one_hot(at.sum(-1).astype(int), C))
        for gate, rows, at in ((first, one, place), (second, two, later))
    )
    inputs = jnp.einsum("gsec,gsm->egcm", combine.astype(bool).astype(x.dtype), x)
    hidden = jax.nn.relu(jnp.einsum("egcm,emf->egcf", inputs, p["wi"]))
    y = jnp.einsum("egcf,efm->egcm", hidden, p["wo"])
    y = jnp.einsum("gsec,egcm->gsm", combine, y)
    return y, (scores.mean(1) * one.mean(1)).mean() * E * E


@forms(one={})
def masks_of_flaxformer(p, x):
    """As `TokensChooseMaskedRouter` of T5X computes them."""
    scores = softmax(x @ p["router"])
    index = jax.lax.top_k(scores, 1)[1][..., 0]
    rows = one_hot(index, E, jnp.int32)
    priority = jnp.cumsum(rows, 1) * rows - 1.0
    dispatch = one_hot(priority.astype(int), C, jnp.bool_)
    combine = jnp.einsum("...ne,...nec->...nec", scores, dispatch.astype(x.dtype))
    inputs = jnp.einsum("gtd,gtec->gecd", x, dispatch.astype(x.dtype))
    hidden = jax.nn.relu(jnp.einsum("gecd,edf->gecf", inputs, p["wi"]))
    y = jnp.einsum("gecf,efd->gecd", hidden, p["wo"])
    return jnp.einsum("gecd,gtec->gtd", y, combine)


@forms(one={})
def experts_under_vmap(p, x):
    x = x.reshape(N, D)
    gates, index = jax.lax.top_k(softmax(x @ p["router"]), K)
    rows = one_hot(index, E, jnp.int32)
    slot = jnp.cumsum(rows.reshape(-1, E), 0).reshape(rows.shape) * rows - 1
    slots = one_hot(slot, C)
    inputs = jnp.einsum("nec,nd->ecd", slots.sum(1), x)
    y = jax.vmap(lambda a, b, y: jax.nn.gelu(y @ a) @ b)(p["wi"], p["wo"], inputs)
    combine = jnp.einsum("nk,nkec->nec", gates, slots)
    return jnp.einsum("nec,ecd->nd", combine, y).reshape(B, T, D)


@forms(one={})
def balanced_by_sinkhorn(p, x):
    """BASE layers (arXiv:2103.16716), with a gate that is no softmax."""
    x = x.reshape(N, D)
    logits = shared = x @ p["router"]
    for _ in range(3):
        shared = shared - jax.nn.logsumexp(shared, 0, keepdims=True)
        shared = shared - jax.nn.logsumexp(shared, 1, keepdims=True)
    rows = one_hot(jnp.argmax(jax.lax.stop_gradient(shared), -1), E)
    slot = (jnp.cumsum(rows, 0) * rows).sum(-1) - 1
    dispatch = rows[..., None] * one_hot(slot.astype(int), C)[:, None]
    y = applied(p, jnp.einsum("tec,td->ecd", dispatch, x))
    gates = (jax.nn.sigmoid(logits) * rows).sum(-1, keepdims=True)
    return (jnp.einsum("tec,ecd->td", dispatch, y) * gates).reshape(B, T, D)


@forms(one={})
def experts_on_devices(p, x):
    """Each device has some experts, which receive tokens from all devices."""

    def on_device(router, wi, wo, x):
        x = x.reshape(-1, D)
        gates, index = jax.lax.top_k(softmax(x @ router), K)
        rows = one_hot(index, E)
        slot = jnp.cumsum(rows.reshape(-1, E), 0).reshape(rows.shape) * rows - 1
        slots = one_hot(slot.astype(int), C) * (slot >= 0)[..., None]
        inputs = jnp.einsum("nec,nd->ecd", slots.sum(1), x)
        inputs = jax.lax.all_to_all(inputs, "e", 0, 1, tiled=True)
        y = applied({"wi": wi, "wo": wo}, inputs)
        y = jax.lax.all_to_all(y, "e", 1, 0, tiled=True)
        combine = (slots * gates[..., None, None]).sum(1)
        return jnp.einsum("nec,ecd->nd", combine, y).reshape(-1, T, D)

    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("e",))
    specs = P(), P("e"), P("e"), P("e")
    run = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P("e"))
    return run(p["router"], p["wi"], p["wo"], x)


# By indices.


@forms(
    set={},
    add={"op": "add"},
    two={"k": K},
    float={"counts": "float32"},
    flat={"is_flat": True},
    dropped={"is_dropped": True, "op": "add"},
)
def scattered(p, x, k=1, op="set", counts="int32", is_flat=False, is_dropped=False):
    """Each token is put into a slot of its expert."""
    x = x.reshape(N, D)
    scores = softmax(x @ p["router"])
    gates, index = jax.lax.top_k(scores, k)
    if k == 1:
        gates, index = scores.max(-1), jnp.argmax(scores, -1)
    gates, index, tokens = gates.reshape(-1), index.reshape(-1), jnp.arange(N * k) // k
    rows = one_hot(index, E, counts)
    slot = ((jnp.cumsum(rows, 0) * rows).sum(-1) - 1).astype(int)
    inputs = x[tokens]
    if is_dropped:
        is_kept = slot < C
        gates, slot = gates * is_kept, jnp.where(is_kept, slot, 0)
        inputs = inputs * is_kept[:, None]
    shape, at = ((E * C,), (index * C + slot,)) if is_flat else ((E, C), (index, slot))
    slots = jnp.zeros((*shape, D), x.dtype)
    slots = getattr(slots.at[at], op)(inputs, mode="drop")
    y = applied(p, slots.reshape(E, C, D)).reshape(*shape, D)
    y = y.at[at].get(mode="fill", fill_value=0) * gates[:, None]
    return y.reshape(N, k, D).sum(1).reshape(B, T, D)


@forms(one={})
def scattered_under_vmap(p, x):
    def group(x):
        gates, index = jax.lax.top_k(softmax(x @ p["router"]), K)
        gates = (gates / gates.sum(-1, keepdims=True)).reshape(-1)
        index = index.reshape(-1)
        rows = one_hot(index, E, jnp.int32)
        slot = (jnp.cumsum(rows, 0) * rows).max(-1) - 1
        slots = jnp.zeros((E, C, D), x.dtype)
        slots = slots.at[index, slot].set(jnp.repeat(x, K, 0), mode="drop")
        y = applied(p, slots)[index, slot] * jnp.where(slot < C, gates, 0)[:, None]
        return y.reshape(T, K, D).sum(1)

    return jax.vmap(group)(x)


@forms(added={}, taken={"is_taken": True}, before={"is_before": True})
def ragged(p, x, is_taken=False, is_before=False):
    """Tokens in the order of their experts, as megablocks and MaxText have them."""
    x = x.reshape(N, D)
    gates, index = jax.lax.top_k(softmax(x @ p["router"]), K)
    gates, index = gates / gates.sum(-1, keepdims=True), index.reshape(-1)
    order, sizes = jnp.argsort(index), jnp.bincount(index, length=E)
    inputs, ordered = x[order // K], gates.reshape(-1)[order][:, None]
    inputs = inputs * ordered if is_before else inputs
    hidden = jax.nn.silu(jax.lax.ragged_dot(inputs, p["wi"], sizes))
    y = jax.lax.ragged_dot(hidden, p["wo"], sizes)
    if is_taken:
        y = y[jnp.argsort(order)].reshape(N, K, D)
        return jnp.einsum("nkd,nk->nd", y, gates).reshape(B, T, D)
    y = y if is_before else y * ordered
    return jnp.zeros_like(x).at[order // K].add(y).reshape(B, T, D)


@forms(one={})
def ordered_and_scattered(p, x):
    x = x.reshape(N, D)
    gates, index = jax.lax.top_k(softmax(x @ p["router"]), K)
    index, sizes = index.reshape(-1), jnp.bincount(index.reshape(-1), length=E)
    order = jnp.argsort(index, stable=True)
    of = index[order]
    slot = jnp.arange(N * K) - (jnp.cumsum(sizes) - sizes)[of]
    slots = jnp.zeros((E, C, D), x.dtype)
    slots = slots.at[of, slot].set(x[order // K], mode="drop")
    y = applied(p, slots).at[of, slot].get(mode="fill", fill_value=0)
    y = y * gates.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // K].add(y).reshape(B, T, D)


# Every expert for every token; and experts that choose their tokens (arXiv:2202.09368).


@forms(softmax={}, sigmoid={"score": jax.nn.sigmoid}, all={"k": None})
def dense(p, x, score=softmax, k=K):
    weights = score(x @ p["router"])
    if k is not None:
        gates, index = jax.lax.top_k(weights, k)
        gates = gates / gates.sum(-1, keepdims=True)
        weights = (one_hot(index, E) * gates[..., None]).sum(2)
    hidden = jax.nn.relu(jnp.einsum("btd,edf->btef", x, p["wi"]))
    return jnp.einsum("btef,efd,bte->btd", hidden, p["wo"], weights)


@forms(three={}, combination={"is_combined": True})
def choice_by_one_hot_rows(p, x, is_combined=False):
    scores = softmax(x @ p["router"])
    gates, index = jax.lax.top_k(scores.mT, C)
    rows = one_hot(index, T)
    inputs = jnp.einsum("bect,btd->becd", rows, x)
    hidden = jax.nn.relu(jnp.einsum("becd,edf->becf", inputs, p["wi"]))
    y = jnp.einsum("becf,efd->becd", hidden, p["wo"])
    if is_combined:
        combine = jnp.einsum("bec,bect->btec", gates, rows)
        return jnp.einsum("btec,becd->btd", combine, y)
    return jnp.einsum("bect,bec,becd->btd", rows, gates, y)


@forms(one={})
def choice_by_indices(p, x):
    x = x.reshape(N, D)
    gates, index = jax.lax.top_k(softmax(x @ p["router"]).T, C)
    y = applied(p, x[index]) * gates[..., None]
    return jnp.zeros_like(x).at[index].add(y).reshape(B, T, D)


# The layers: expected labels, a network of them, and what is read of it.

MIXTURE = {"router": (D, E), "wi": (E, D, F), "wo": (E, F, D)}
ATTENTION = dict.fromkeys("qkvo", (D, D))
SHARED = {"up": (D, F), "down": (F, D)}


def attention(p, x):
    q, k, v = ((x @ p[name]).reshape(B, T, 2, -1) for name in "qkv")
    w = softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", w, v).reshape(B, T, D) @ p["o"]


def read(
    form,
    layers,
    shapes,
    *,
    way="",
    between=normed,
    dtype=jnp.float32,
    slopes=False,
    is_embedded=True,
):
    """The reading of a network of some layers, and its labels layer by layer."""

    def layer(x, p):
        if "q" in p:
            x = x + attention(p, between(x))
        y, loss = made if isinstance(made := form(p, between(x)), tuple) else (made, 0)
        if "up" in p:
            y = y + jax.nn.relu(between(x) @ p["up"]) @ p["down"]
        return (x + y).astype(x.dtype), jnp.asarray(loss, jnp.float32)

    def loss(params, tokens):
        x = params["embed"][tokens] if is_embedded else tokens
        if way == "scan":
            x, losses = jax.lax.scan(layer, x, params["layers"])
        else:
            losses = []
            of = jax.checkpoint(layer) if way == "remat" else layer
            for p in params["layers"]:
                x, more = of(x, p)
                losses.append(more)
        logits = between(x) @ params["head"]
        return jax.nn.logsumexp(logits, -1).mean() + sum(losses)

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    lead = [layers] if way == "scan" else []
    one = {name: array(*lead, *shape) for name, shape in shapes.items()}
    params = {"head": array(D, V)} | ({"embed": array(V, D)} if is_embedded else {})
    params["layers"] = one if way == "scan" else [one] * layers
    fun = jax.value_and_grad(loss) if slopes else loss
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    reading = mc.read_model(fun, params, tokens if is_embedded else array(B, T, D))
    labels = reading.labels["layers"]
    return reading, [labels] if way == "scan" else labels


def check(form, layers, shapes=MIXTURE, **options):
    reading, labels = read(form, layers, shapes, **options)
    labels_of = {"router": "router", "bias": "vector"}
    expected = {name: labels_of.get(name, "matrix") for name in shapes}
    assert labels == [expected] * len(labels)
    assert not (reading.refused or reading.not_clipped or reading.unknown)
    assert len(reading.attention) == (layers if "q" in shapes else 0)


DAILY = {"switch: summed", "several of top k: renormalized", "scattered: set"}
DAILY |= {"gshard: all", "choice by one hot rows: three", "ragged: taken"}


@pytest.mark.parametrize("form", few(FORMS, *DAILY))
def test_a_router_is_one_in_the_first_layer_and_in_later_ones(form):
    for layers in (1, 3):
        check(FORMS[form], layers)


def test_biases_of_experts_are_no_features_that_a_product_sums_over():
    check(FORMS["several of top k: as they are"], 2, MIXTURE | {"bias": (E, D)})


@pytest.mark.parametrize("form", few(FORMS, "scattered: set"))
def test_routers_of_tokens_that_no_layer_made(form):
    check(FORMS[form], 2, between=lambda x: x, is_embedded=False)


@pytest.mark.more
@pytest.mark.parametrize("form", FORMS)
def test_routers_without_norms_next_to_attention_and_a_shared_expert(form):
    check(FORMS[form], 2, between=lambda x: x)
    check(FORMS[form], 2, MIXTURE | SHARED | ATTENTION)


@pytest.mark.more
@pytest.mark.parametrize("form", FORMS)
def test_routers_in_a_scan_under_remat_in_bfloat16_and_with_slopes(form):
    for way in ("scan", "remat"):
        check(FORMS[form], 2, way=way)
    check(FORMS[form], 2, dtype=jnp.bfloat16)
    check(FORMS[form], 2, slopes=True)


def batch_norm(x):
    return (x - x.mean((0, 1))) / x.std((0, 1))


@pytest.mark.parametrize("between", [jnp.tanh, batch_norm, jax.nn.gelu])
def test_outputs_of_experts_are_no_logits_whatever_norm_follows(between):
    """They weigh nothing where the next layer sends them to its experts."""
    for form in ("switch: summed", "gshard: all"):
        check(FORMS[form], 2, between=between)


@pytest.mark.parametrize("order", [1, -1])
def test_slots_of_soft_experts_are_a_router(order):
    """Soft MoE (arXiv:2308.00951) takes two softmaxes of one product, in any order.

    The one over tokens alone would be attention that learned queries ask. The one over
    slots decides whose outputs a token receives, so the slots are no queries to clip.
    """

    def soft(p, x):
        logits = jnp.einsum("btd,des->btes", x, p["router"])

        makers = (
            lambda: softmax(logits, 1),
            lambda: softmax(logits.reshape(B, T, -1)).reshape(logits.shape),
        )
        weights = [made() for made in makers[::order]][::order]
        inputs = jnp.einsum("btes,btd->besd", weights[0], x)
        hidden = jax.nn.relu(jnp.einsum("besd,edf->besf", inputs, p["wi"]))
        y = jnp.einsum("besf,efd->besd", hidden, p["wo"])
        return jnp.einsum("btes,besd->btd", weights[1], y)

    for layers in (1, 3):
        check(soft, layers, MIXTURE | {"router": (D, E, 2)})


def test_layers_that_differ_at_one_line_are_asked_about():
    """A router in one layer that is a matrix in the next may be read wrong."""

    def loss(params, x):
        for i, p in enumerate(params["layers"]):
            y = x @ p["kernel"]
            if i:
                gates, chosen = jax.lax.top_k(softmax(y), 2)
                gates = (one_hot(chosen, D) * gates[..., None]).sum(-2)
                x = x + jnp.einsum("ne,nd,ed->nd", gates, x, p["more"])
            else:
                x = x + jax.nn.relu(y) @ p["more"]
        return jax.nn.logsumexp(x @ params["head"])

    one = {n: jax.ShapeDtypeStruct((D, D), jnp.float32) for n in ("kernel", "more")}
    params = {"layers": [one] * 2, "head": jax.ShapeDtypeStruct((D, V), jnp.float32)}
    reading = mc.read_model(loss, params, jax.ShapeDtypeStruct((T, D), jnp.float32))
    assert [x["kernel"] for x in reading.labels["layers"]] == ["matrix", "router"]
    said = r"a matrix or router, layer by layer, at test_routers\.py:\d"
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(mc.muon(0.1, model=reading).init, params)
