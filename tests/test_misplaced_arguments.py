"""Arguments of other names, in other places, or of other kinds: errors say which."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import ones

import muonclip_jax as mc


PARAMS = {n: 0.1 * ones(8, 8) for n in ("query", "key", "value")}
X = ones(2, 5, 8)


def loss(params, x):
    query, key, value = ((x @ w).reshape(2, 5, 2, 4) for w in params.values())
    return jnp.mean(jax.nn.dot_product_attention(query, key, value))


@functools.cache
def made():
    reading = mc.read_model(loss, PARAMS, X)
    grads, stats = jax.grad(mc.record_attention(loss), has_aux=True)(PARAMS, X)
    return reading, grads, stats, mc.muonclip(0.1, model=reading).init(PARAMS)


def updated(grads, with_model=True, only_clip=False):
    reading, right, stats, _ = made()
    make = mc.qk_clip if only_clip else functools.partial(mc.muonclip, 0.1)
    tx = make(model=reading if with_model else None, attention=reading.attention)
    return jax.eval_shape(
        lambda grads: tx.update(grads, tx.init(PARAMS), PARAMS, attention_stats=stats),
        grads(right),
    )


WRONG_GRADIENTS = {
    "a leaf more": (
        lambda g: g | {"extra": ones(3, 3)},
        "gradients and params have different structures: the params lack 'extra'",
    ),
    "transposed": (
        lambda g: g | {"value": ones(8, 4).T},
        r"the gradient of 'value' has shape \(4, 8\), but in the params it is \(8, 8\)",
    ),
    "with its loss": (
        lambda g: (jnp.float32(0), g),
        r"got \(value, gradients\), as jax.value_and_grad",
    ),
    "its loss alone": (
        lambda g: jnp.float32(0),
        r"the gradients lack 'key', 'query', 'value'; the params lack '\(the array it",
    ),
    "that broadcasts": (
        lambda g: g | {"key": ones(1, 8)},
        r"the gradient of 'key' has shape \(1, 8\), but",
    ),
    "complex": (
        lambda g: jax.tree.map(lambda x: x * (1 + 1j), g),
        "the gradient of 'key' has dtype complex64, but its parameter is real",
    ),
}


@pytest.mark.parametrize("with_model", [True, False], ids=["read", "by names"])
@pytest.mark.parametrize("which", WRONG_GRADIENTS)
def test_wrong_gradients_are_named_and_no_reading_is(which, with_model):
    grads, message = WRONG_GRADIENTS[which]
    with pytest.raises(ValueError, match=message) as error:
        updated(grads, with_model)
    assert "model=" not in str(error.value)


def test_clip_alone_refuses_updates_of_another_shape():
    with pytest.raises(ValueError, match=r"the update of 'key' has shape \(1, 8\)"):
        updated(WRONG_GRADIENTS["that broadcasts"][0], only_clip=True)


MISPLACED = {
    "scalars swapped": lambda r, g, s, state: mc.scalars(PARAMS, state, model=r),
    "scalars swapped, by names": lambda r, g, s, state: mc.scalars(PARAMS, state),
    "describe a reading": lambda r, *_: mc.describe(r),
    "describe a state": lambda r, g, s, state: mc.describe(state),
    "labels of a reading": lambda r, *_: mc.param_labels(r),
    "labels of a state": lambda r, g, s, state: mc.param_labels(state),
    "mask of a state": lambda r, g, s, state: mc.matrix_mask(state),
    "clip a train state": lambda r, g, s, state: mc.clip_qk(
        {"params": PARAMS, "opt_state": state}, s, model=r
    ),
    "layers of a function": lambda *_: mc.flax_attention_layers(loss),
    "labels of a function": lambda *_: mc.param_labels(loss),
    "numbers of a state": lambda r, g, s, state: mc.flax_dimension_numbers(state),
}


@pytest.mark.parametrize("call", MISPLACED)
def test_what_is_given_for_params_is_named(call):
    with pytest.raises(ValueError, match="^[a-z_]+ needs the params, got (a|the) "):
        MISPLACED[call](*made())


def test_scalars_want_the_state_and_neither_optimizer_nor_statistics():
    reading, _, stats, _ = made()
    for got, given in {"the optimizer": mc.muon(0.1), "attention st": stats}.items():
        with pytest.raises(ValueError, match=f"scalars needs a state, got {got}"):
            mc.scalars(given, PARAMS, model=reading)


def test_containers_of_two_kinds_are_named():
    tx, leaves = mc.muon(0.1), [ones(8, 8)]
    with pytest.raises(ValueError, match="containers differ, in tuple and list$"):
        tx.update((*leaves,), tx.init(leaves), leaves)


def test_params_under_a_key_of_their_own_are_named():
    tx, params = mc.muon(0.1), {"a": {"kernel": ones(8, 4)}}
    said = re.escape("['a']['kernel'] in the gradients is ['params']['a']['kernel']")
    with pytest.raises(ValueError, match=f"what is {said} in the params"):
        tx.update(params, tx.init(params), {"params": params})


def test_params_in_place_of_shardings_are_shown_in_short():
    with pytest.raises(
        ValueError, match=r"at 'key' is an array of float32 \(8, 8\); it"
    ):
        mc.muon(0.1, shardings=PARAMS).init(PARAMS)


UNREADABLE = {
    "swapped": (loss, X.astype(int), "needs params that are floats, got an array of"),
    "a class": (loss, object, "needs params that are floats, got the function object"),
    "shapes": (loss, {"query": (8, 8)}, "needs params that are floats"),
    "no return": (lambda p, x: (loss(p, x), None)[1], PARAMS, "nothing .* depends on"),
    "others": (
        lambda p, x: loss(PARAMS, x),
        PARAMS,
        "nothing .* depends on its params",
    ),
}


@pytest.mark.parametrize("which", UNREADABLE)
def test_readings_that_could_say_nothing(which):
    fun, params, message = UNREADABLE[which]
    with pytest.raises(ValueError, match=message):
        mc.read_model(fun, params, X)


BY_POSITION = {
    "muon": mc.muon,
    "muonclip": lambda r: mc.muonclip(0.1, r),
    "qk_clip": mc.qk_clip,
    "clip_qk": lambda r: mc.clip_qk(PARAMS, made()[2], r),
    "describe": lambda r: mc.describe(PARAMS, r),
    "param_labels": lambda r: mc.param_labels(PARAMS, r),
    "scalars": lambda r: mc.scalars(made()[3], PARAMS, r),
}


@pytest.mark.parametrize("call", BY_POSITION)
def test_reading_by_position_belongs_to_model(call):
    with pytest.raises(ValueError, match=rf"{call}\(\) got a reading .*model=reading"):
        BY_POSITION[call](made()[0])


UNKNOWN = {
    "treshold": (mc.muonclip, "did you mean 'threshold'?"),
    "weigth_decay": (mc.muon, "did you mean 'weight_decay'?"),
    "ns_coeffs": (mc.muon, "did you mean 'coeffs' of NewtonSchulz?"),
    "threshold": (mc.muon, "it is one of "),
    "momentum": (mc.scale_by_muon, "it has beta, nesterov, "),
    "shardings_": (mc.qk_clip, "did you mean 'shardings'?"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_argument_has_a_likely_name(name):
    function, likely = UNKNOWN[name]
    with pytest.raises(TypeError) as error:
        function(**{name: 0.5})
    assert f"no argument '{name}'; {likely}" in str(error.value)


def test_right_calls_stay_right():
    reading, grads, stats, state = made()
    tx = optax.inject_hyperparams(mc.muonclip, static_args="model")(
        0.1, model=reading, threshold=lambda step: 50.0
    )
    tx.update(grads, tx.init(PARAMS), PARAMS, attention_stats=stats)
    assert mc.describe(params=PARAMS, model=reading)
    assert mc.scalars(state, PARAMS, model=reading)["param_norm/matrix"] > 0


def test_arguments_of_the_installed_optax_pass():
    own = inspect.signature(optax.MultiSteps.__init__).parameters
    options = {"accumulator_dtype": jnp.float32} if "accumulator_dtype" in own else {}
    assert mc.multi_steps(mc.muonclip(0.1), 2, **options)
