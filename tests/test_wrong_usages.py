"""Wrong usages, one a row: an error in the user's words, or why it is none.

First every argument of every public function with values of each wrong type; then what
only some of them can get wrong.
"""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import inputs, linen_variables, LinenModel, nnx_model, ones
from optax.contrib import MuonDimensionNumbers

import muonclip_jax as mc


pytestmark = [
    pytest.mark.usefixtures("fast_compilation"),
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64"),
]

KERNEL = ones(8, 2, 4)
PARAMS = {
    "attn": {"query": {"kernel": KERNEL}, "key": {"kernel": KERNEL}},
    "mlp": {"kernel": ones(8, 16), "bias": ones(16)},
}
GRADS = jax.tree.map(lambda x: 0.1 * x, PARAMS)
STATS = {"attn": {"max_logits": jnp.array([90.0, 400.0])}}
WITH_BIASES = {
    "attn": {n: {"kernel": KERNEL, "bias": ones(2, 4)} for n in ("query", "key")}
}
QUERY = ones(2, 5, 4, 3)
KEY = ones(2, 5, 2, 3)


def update(tx, grads=GRADS, params=PARAMS, stats=STATS):
    """Traces an update, which is all that an error may wait for."""

    def step(grads, params, stats):
        state = tx.init(params)
        return tx.update(grads, state, params, attention_stats=stats)

    jax.eval_shape(step, grads, params, stats)


def step(make):
    return lambda **options: update(make(**options))


#: One value of each type, to be refused unless a row below says that it is right.
VALUES = {
    "string": "no",
    "dict": {"attn": 1},
    "list": [1.0],
    "object": object(),
    "nan": float("nan"),
    "negative": -1.0,
    "complex": 1j,
    "array": np.ones((2, 3)),
    "none": None,
    "bool": True,
    "function": lambda count: "what it returns is wrong, too",
}

# Optax does not refuse negative rates either: they ascend. What a schedule returns is
# its own affair.
RATE = {"function", "negative"}
RATE_OR_NONE = RATE | {"none"}
FLAG = {"bool"}
FLAG_OR_NONE = FLAG | {"none"}
SCHEDULE = {"function"}
FUNCTION_OR_NONE = {"none", "function"}
NUMBER: set[str] = set()
WHOLE, CHOICE, ARRAY = NUMBER, NUMBER, NUMBER
NUMBER_OR_NONE = {"none"}
WHOLE_OR_NONE, DTYPE, TREE_OR_NONE, WINDOW = [NUMBER_OR_NONE] * 4
# Numbers and short lists broadcast.
BROADCAST = {"none", "list", "nan", "negative", "bool"}

MUON = {
    "beta": SCHEDULE,
    "nesterov": FLAG,
    "orthogonalizer": CHOICE,
    "consistent_rms": NUMBER_OR_NONE,
    "mu_dtype": DTYPE,
    "model": TREE_OR_NONE,
    "dimension_numbers": TREE_OR_NONE,
}
ADAMW = {
    "learning_rate": RATE,
    "weight_decay": RATE,
    "weight_decay_mask": TREE_OR_NONE | FLAG,
    "adam_learning_rate": RATE_OR_NONE,
    "adam_b1": NUMBER,
    "adam_b2": NUMBER,
    "adam_eps": NUMBER,
    "adam_weight_decay": RATE_OR_NONE,
    "cautious_weight_decay": FLAG,
    "neuron_b2": NUMBER_OR_NONE,
    "per_head": FLAG_OR_NONE,
}
CLIP = {"threshold": SCHEDULE, "alpha": SCHEDULE, "model": TREE_OR_NONE}
CLIP["attention"] = TREE_OR_NONE
LOGITS = {
    "query": ARRAY,
    "key": ARRAY,
    "bias": BROADCAST - {"bool"},
    "mask": BROADCAST - {"negative"},
    "is_causal": FLAG,
    "scale": NUMBER_OR_NONE | {"negative"},
    "local_window_size": WINDOW,
}
IDS = {"query_segment_ids": BROADCAST, "key_segment_ids": {"none"}}

#: Functions, calls of them with what they need, and their arguments.
ARGUMENTS = {
    "muonclip": (
        step(lambda **o: mc.muonclip(**{"learning_rate": 1e-3} | o)),
        MUON | ADAMW | CLIP,
    ),
    "muon": (step(lambda **o: mc.muon(**{"learning_rate": 1e-3} | o)), MUON | ADAMW),
    "scale_by_muon": (
        lambda **o: update(mc.scale_by_muon(**o), *[{"w": jnp.ones((3, 4))}] * 2),
        MUON | {"per_head": FLAG_OR_NONE},
    ),
    "normalize_neurons": (
        lambda **o: update(mc.normalize_neurons(**o), *[{"w": jnp.ones((3, 4))}] * 2),
        {"b2": NUMBER, "eps": NUMBER}
        | {x: MUON[x] for x in ("model", "dimension_numbers")}
        | {"per_head": FLAG_OR_NONE},
    ),
    "add_cautious_decayed_weights": (
        step(mc.add_cautious_decayed_weights),
        {"weight_decay": RATE},
    ),
    "newton_schulz": (
        lambda **o: mc.newton_schulz(**{"x": jnp.ones((3, 4))} | o),
        {
            "x": {"array"},
            "coeffs": CHOICE,
            "steps": WHOLE_OR_NONE,
            "method": CHOICE,
            "dtype": DTYPE,
            "preconditioning": CHOICE,
        },
    ),
    "qk_clip": (step(mc.qk_clip), CLIP),
    # That it takes no schedules is a row below.
    "clip_qk": (lambda **o: mc.clip_qk(PARAMS, STATS, **o), CLIP),
    "scalars": (
        lambda **o: mc.scalars(mc.qk_clip().init(PARAMS), PARAMS, **o),
        {x: TREE_OR_NONE for x in ("attention", "model", "updates")} | {"heads": FLAG},
    ),
    "param_labels": (lambda **o: mc.param_labels(PARAMS, **o), {"model": TREE_OR_NONE}),
    "matrix_mask": (lambda **o: mc.matrix_mask(PARAMS, **o), {"model": TREE_OR_NONE}),
    "record_attention": (
        lambda **o: mc.record_attention(lambda p: (p["w"].sum(), 0), **o)({"w": KEY}),
        {"has_aux": FLAG, "strict": FLAG},
    ),
    "multi_steps": (
        step(
            lambda **o: mc.multi_steps(
                **{"opt": mc.muonclip(1e-3), "every_k_schedule": 2} | o
            )
        ),
        {
            "opt": set(),
            "every_k_schedule": SCHEDULE,
            "use_grad_mean": FLAG,
            "should_skip_update_fn": FUNCTION_OR_NONE,
            "attention": TREE_OR_NONE,
            "model": TREE_OR_NONE,
        },
    ),
    "max_logits": (
        lambda **o: mc.max_logits(**{"query": QUERY, "key": KEY} | o),
        LOGITS | IDS,
    ),
    "blockwise_attention": (
        lambda **o: mc.blockwise_attention(
            **{"query": QUERY, "key": KEY, "value": KEY} | o
        ),
        LOGITS | IDS | {"value": ARRAY, "block_size": WHOLE},
    ),
    "splash_attention": (
        lambda **o: mc.splash_attention(
            **{"query": QUERY, "key": KEY, "value": KEY, "interpret": True} | o
        ),
        {x: LOGITS[x] for x in ("query", "key", "is_causal", "scale")}
        | IDS
        | {"value": ARRAY, "local_window_size": WINDOW, "block_size": WHOLE},
    ),
    "attention_fn": (
        lambda **o: mc.attention_fn(QUERY, KEY, KEY, **o),
        {"kernel": FUNCTION_OR_NONE},
    ),
    "describe": (
        lambda **o: mc.describe(PARAMS, **o),
        {
            "attention": TREE_OR_NONE,
            "model": TREE_OR_NONE,
            "dimension_numbers": TREE_OR_NONE,
            "per_head": FLAG_OR_NONE,
            "weight_decay": RATE_OR_NONE,
            "weight_decay_mask": ADAMW["weight_decay_mask"],
            "adam_weight_decay": RATE_OR_NONE,
            "stacks": FLAG,
            "collapse": FLAG,
        },
    ),
    "flax_dimension_numbers": (
        lambda **o: mc.flax_dimension_numbers(PARAMS, **o),
        {"per_head": FLAG_OR_NONE},
    ),
}

#: Arguments that are no options: trees, checked below or by their own tests.
ELSEWHERE = {
    # Layouts on a mesh: tests/mesh.
    *("shardings", "axis_name", "slow_axes", "repeat_axes"),
    # A function, and what it takes: tests/reading.
    *("fun", "args", "kwargs", "of", "maxima"),
    # Trees: rows below, and tests/parameters.
    *("params", "attention_stats", "opt_state", "first", "others"),
    # Names of modules, which have to be there: tests/parameters.
    *("stack_axes", "query", "key"),
    # optax's, Flax's, tokamax's and JAX's own.
    *("mask", "implementation", "logits_soft_cap", "interpret", "config", "options"),
}
FLAX = set(inspect.signature(mc.attention_fn).parameters) - {"kernel"}


def test_every_argument_of_every_public_function_is_here():
    for name, function in inspect.getmembers(mc, inspect.isfunction):
        arguments = set(inspect.signature(function).parameters)
        arguments -= ELSEWHERE | (FLAX if name == "attention_fn" else set())
        _, listed = ARGUMENTS.get(name, (None, {}))
        assert arguments - {"dimension_numbers"} <= listed.keys(), name


ROWS = [
    (function, argument)
    for function, (_, arguments) in ARGUMENTS.items()
    for argument in arguments
]


@pytest.mark.parametrize(("function", "argument"), ROWS)
def test_values_of_wrong_types(function, argument):
    call, arguments = ARGUMENTS[function]
    message = "x must|newton_schulz needs" if argument == "x" else argument
    accepted = {}
    for name in VALUES.keys() - arguments[argument]:
        try:
            accepted[name] = call(**{argument: VALUES[name]})
        except ValueError as error:
            assert re.search(message, str(error)), (name, error)
    assert not accepted


def clip(**options):
    return lambda: update(mc.muonclip(**{"learning_rate": 1e-3} | options))


def polynomials(**settings):
    return lambda: mc.NewtonSchulz(**settings)


def with_numbers(pattern, *axes):
    return clip(dimension_numbers={pattern: MuonDimensionNumbers(*axes)})


def with_mask(leaf):
    return clip(weight_decay_mask=jax.tree.map(lambda x: leaf(x), PARAMS))


def with_layer(query, key):
    return clip(attention=[mc.AttentionLayer("attn", query, key)])


def with_grads(**leaves):
    return lambda: update(mc.muonclip(1e-3), GRADS | leaves)


def with_stats(stats):
    return lambda: update(mc.muonclip(1e-3), stats=stats)


def with_logits(leaf):
    return with_stats({"attn": {"max_logits": leaf}})


def of_dtype(dtype, **options):
    params = {"w": jnp.ones((3, 4), dtype)}
    return lambda: update(mc.scale_by_muon(**options), params, params)


def direct(name, *arguments):
    """The update with its arguments in another order, or of another optimizer."""

    def call():
        tx, muon = mc.muonclip(1e-3), mc.muon(1e-3)
        given = {"grads": GRADS, "params": PARAMS, "none": None, "stats": STATS}
        given |= {"state": tx.init(PARAMS), "of muon": muon.init(PARAMS)}
        given |= {"small": muon.init(PARAMS["mlp"])}
        tx = {"muon": muon, "muonclip": tx, "scale_by_muon": mc.scale_by_muon()}[name]
        extra = {"attention_stats": STATS} if name == "muonclip" else {}
        tx.update(*(given[x] for x in arguments), **extra)

    return call


def attend(**options):
    return lambda: mc.max_logits(QUERY, KEY, **options)


def orthogonalize(x, **options):
    return lambda: mc.newton_schulz(x, **options)


QUERY_LEAF = mc.HeadLeaf("query/kernel", 3)
KEY_LEAF = mc.HeadLeaf("key/kernel", 3)
NO_SCHEDULE = "it takes no schedule.*optax.inject_hyperparams"
NO_LAYERS = "a function from params to one; got "


def of_shapes(query, key, heads):
    """The clip of a layer with kernels of these shapes."""
    shapes = {"query": query, "key": key}
    params = {"attn": {name: {"kernel": jnp.ones(x)} for name, x in shapes.items()}}
    stats = {"attn": {"max_logits": jnp.ones(heads)}}
    return lambda: update(mc.muonclip(1e-3), params, params, stats)


def normalized(library):
    """Flax's own layers with QK-norm, at `init` and in the function."""
    if library == "nnx":
        model = nnx_model(normalize_qk=True)
        nnx.Optimizer(model, mc.muonclip(1e-3), wrt=nnx.Param)
    model = LinenModel(options=(("normalize_qk", True),))
    params = linen_variables(model, inputs())["params"]
    mc.muon(1e-3).init(params)  # which does not mind
    mc.muonclip(1e-3).init(params) if library == "linen" else mc.clip_qk(params, {})


#: What is wrong, and what the message says.
WRONG = {
    "adam_b1 is a schedule": (
        clip(adam_b1=optax.linear_schedule(0.85, 0.95, 300)),
        f"adam_b1 must be a number, got .*{NO_SCHEDULE}.*adam_b1=schedule",
    ),
    "neuron_b2 is a schedule": (clip(neuron_b2=lambda count: 0.9), NO_SCHEDULE),
    "consistent_rms is a schedule": (clip(consistent_rms=lambda c: 0.2), NO_SCHEDULE),
    "steps are a schedule": (
        polynomials(steps=lambda count: 5),
        "steps must be a whole",
    ),
    "steps are traced": (
        lambda: jax.jit(lambda n: mc.newton_schulz(jnp.eye(3), steps=n))(5),
        "steps must be a whole number from 1 on, known when tracing",
    ),
    "an orthogonalizer that was not made": (
        clip(orthogonalizer=mc.NewtonSchulz),
        r"orthogonalizer must be one of .*mc.NewtonSchulz\(...\), or a function",
    ),
    "coefficients as an orthogonalizer": (
        clip(orthogonalizer=(3.4445, -4.775, 2.0315)),
        r"orthogonalizer must be one of .*mc.NewtonSchulz\(...\)",
    ),
    "an orthogonalizer of another shape": (
        lambda: update(mc.muon(1e-3, orthogonalizer=lambda x: x @ x.mT)),
        r"the orthogonalizer returned an array of float32 .* for a stack of matrices",
    ),
    "an orthogonalizer that was called as a schedule": (
        lambda: update(
            optax.inject_hyperparams(mc.muon)(
                1e-3, orthogonalizer=lambda x: x / (1 + jnp.abs(x).max())
            )
        ),
        r"optax.inject_hyperparams calls .*static_args=\('orthogonalizer',\)",
    ),
    "a dtype that was called as a schedule": (
        lambda: optax.inject_hyperparams(mc.muon)(1e-3, mu_dtype=jnp.bfloat16).init({}),
        r"mu_dtype must be a dtype, got an array .*static_args=\('mu_dtype',\)",
    ),
    "a schedule that was not made": (
        clip(learning_rate=optax.constant_schedule),
        "schedule learning_rate must be a number, .*; call what makes the schedule",
    ),
    "a flag is traced": (
        lambda: jax.jit(lambda n: mc.muon(1e-3, nesterov=n) and n)(True),
        "nesterov must be True or False, known when tracing",
    ),
    "beta above 1": (clip(beta=95), r"beta must be in \[0, 1\], got 95"),
    "beta for each leaf": (clip(beta=jnp.ones(2)), "beta must be one number"),
    "adam_b2 of 1": (clip(adam_b2=1.0), r"adam_b2 must be in \[0, 1\), got 1.0"),
    "learning rate is nan": (
        clip(learning_rate=np.nan),
        "learning_rate must be finite",
    ),
    "weight decay is infinite": (clip(weight_decay=np.inf), "weight_decay must be fin"),
    "5.7 steps": (polynomials(steps=5.7), "steps must be a whole number from 1 on"),
    "no steps": (polynomials(steps=0), "steps must be at least 1, got 0"),
    "steps are a string": (polynomials(steps="5"), "steps must be .*got '5'"),
    "steps for each": (polynomials(steps=jnp.array([5, 5])), "steps must be"),
    "coefficients in a tuple": (
        polynomials(coeffs=("keller",)),
        r"triples; got \('keller',\)",
    ),
    "coefficients of two lengths": (
        polynomials(coeffs=((1, 2, 3), (1, 2))),
        "coeffs must be a preset name, one triple",
    ),
    "coefficients of optax": (
        polynomials(coeffs="standard"),
        "unknown coeffs 'standard'",
    ),
    "consistent_rms is a string": (
        clip(consistent_rms="0.2"),
        "must be a number or 'mup' or None or a function.*, got '0.2'",
    ),
    **{
        f"mu_dtype is {dtype}": (
            clip(mu_dtype=dtype),
            f"mu_dtype must be a float dtype, .*int8 or None; got '{dtype}'",
        )
        for dtype in ("float17", "int32", "uint8", "int4", "bool", "complex64")
    },
    **{
        f"{name} is {dtype}": (clip(**{name: dtype}), f"{name} must be a float dtype")
        for name in ("mu_dtype",)
        for dtype in ("float8_e4m3fn", "float8_e5m2", "complex128")
    },
    **{
        f"dtype is {dtype}": (polynomials(dtype=dtype), "dtype must be a float dtype")
        for dtype in ("int8", "float8_e4m3fn", "float8_e5m2", "complex128")
    },
    "params of 8 bits": (
        of_dtype("float8_e4m3fn"),
        "'w' are no floats of 16 bits or more. Give a mu_dtype",
    ),
    "kernels without an axis of heads": (
        of_shapes((8, 8), (8, 8), 2),
        "'attn/query/kernel'.*attention=",
    ),
    "key heads that do not divide query heads": (
        of_shapes((8, 4, 2), (8, 3, 2), 4),
        "'attn/key/kernel'",
    ),
    "QK-norm of Linen": (
        lambda: normalized("linen"),
        "'layer_0/attention', 'layer_1/attention'.*normalized",
    ),
    "QK-norm of Linen in the function": (lambda: normalized("function"), "normalized"),
    "QK-norm of NNX": (lambda: normalized("nnx"), "'layers/0', 'layers/1'.*normalized"),
    "a direction of vectors": (
        lambda: mc.scale_by_muon().init(PARAMS | {"norm": {"scale": jnp.ones(2)}}),
        "'mlp/bias', 'norm/scale'.*matrix_mask",
    ),
    "a mask that splits a layer": (
        lambda: update(optax.masked(mc.qk_clip(), mc.matrix_mask), *[WITH_BIASES] * 2),
        "'attn/query/bias', 'attn/key/bias'.*together",
    ),
    "params of integers": (of_dtype("int32"), "leaves that hold no matrix: 'w'"),
    **{
        f"{name} of {maker.__name__} is {value}": (
            functools.partial(maker, *arguments, **{name: value}),
            message,
        )
        for name, value, message in (
            ("threshold", 0, "threshold must be positive, got"),
            ("alpha", 1.1, r"alpha must be in \[0, 1\], got"),
        )
        for maker, *arguments in (
            (mc.muonclip, 1e-3),
            (mc.qk_clip,),
            (mc.clip_qk, PARAMS, STATS),
        )
    },
    "threshold by layer": (
        clip(threshold={"attn": 100.0}),
        "threshold must be a number",
    ),
    "threshold of a layer": (
        clip(
            attention=[
                mc.AttentionLayer("attn", (QUERY_LEAF,), (KEY_LEAF,), threshold="high")
            ]
        ),
        "threshold of layer 'attn' must be a number or .*got 'high'",
    ),
    "threshold for each head": (
        clip(threshold=jnp.ones(2)),
        "threshold of shape .* does not fit the layer 'attn'",
    ),
    "attention is a name": (clip(attention="flax"), "attention= must be .*got 'flax'"),
    "a function of other things": (
        clip(attention=lambda params: mc.flax_attention_layers),
        NO_LAYERS + "the function flax_attention_layers",
    ),
    "attention is a reading": (
        clip(attention=mc.read_model(lambda p: p["w"] * 2, {"w": jnp.ones(3)})),
        NO_LAYERS,
    ),
    "a leaf in place of a layer": (
        clip(attention=[QUERY_LEAF]),
        "mc.AttentionLayer, .*got a sequence with HeadLeaf",
    ),
    "leaves are paths": (
        with_layer(("query/kernel",), ("key/kernel",)),
        r"query of attention layer 'attn' must be a tuple of mc.HeadLeaf.*got \('query",
    ),
    "a role is one leaf": (
        with_layer((QUERY_LEAF,), KEY_LEAF),
        r"key of attention layer 'attn' must be a tuple.*\(mc.HeadLeaf",
    ),
    "a function that was called as a schedule": (
        lambda: optax.inject_hyperparams(mc.qk_clip)(
            attention=functools.partial(mc.flax_attention_layers, stack_axes={})
        ).init(PARAMS),
        r'static_args=\("attention",\)',
    ),
    "a layer whose leaves are not there": (
        with_layer((mc.HeadLeaf("wq", 3),), (mc.HeadLeaf("wk", 3),)),
        "'attn/wq', 'attn/wk'",
    ),
    "no layers but statistics": (
        clip(attention=[]),
        "'attn/max_logits' match no query and key",
    ),
    "dimension numbers are axes": (
        clip(dimension_numbers={"attn": (0, 1), "mlp": None}),
        "dimension_numbers at 'attn/0' is 0; it must be optax.contrib.MuonDim",
    ),
    "an axis too many": (with_numbers("mlp*", 0, 5), "'mlp/bias'.*axis 5 is out of"),
    "one axis twice": (with_numbers("mlp/kernel", 0, 0), "'mlp/kernel'.*distinct"),
    **{
        f"an axis is {axis!r}": (
            with_numbers("mlp/kernel", axis, 1),
            "'mlp/kernel' .*an axis must be a whole number, got ",
        )
        for axis in (None, 0.0, "a", True, (0.5,), [None])
    },
    "a decay mask of arrays": (
        with_mask(jnp.ones_like),
        "weight_decay_mask at 'attn/key/kernel' must be True or False",
    ),
    "a decay and its mask swapped": (
        lambda: mc.add_cautious_decayed_weights(mc.matrix_mask, 0.1),
        "^mask must be a tree or a function of the params, got 0.1",
    ),
    "a decay mask of ones": (with_mask(lambda _: 1), "must be True or False, got 1"),
    "a decay mask of names": (clip(weight_decay_mask="kernel"), "weight_decay_mask at"),
    "a decay mask that is a list": (clip(weight_decay_mask=[True]), "has no entry for"),
    "gradients of another shape": (
        with_grads(mlp={"kernel": jnp.ones((16, 8)), "bias": jnp.ones(16)}),
        r"the gradient of 'mlp/kernel' has shape \(16, 8\), .* params .*\(8, 16\)",
    ),
    "gradients of another vector": (
        with_grads(mlp={"kernel": jnp.ones((8, 16)), "bias": jnp.ones(8)}),
        r"the gradient of 'mlp/bias' has shape \(8,\)",
    ),
    "gradients lack a leaf": (
        with_grads(mlp={"kernel": jnp.ones((8, 16))}),
        "gradients and params have different structures: .*gradients lack 'mlp/bias'",
    ),
    "gradients have a leaf more": (
        with_grads(more=jnp.ones((2, 2))),
        r"gradients and params have different structures: the params lack 'more'(?!\.)",
    ),
    "a module in place of its arrays": (
        lambda: _step_on_a_module(),
        r"the gradients lack 'activation'\. .*eqx.is_inexact_array",
    ),
    "the state of other params": (
        direct("muon", "grads", "small", "params"),
        "made by a muon with other settings: it lacks .*'mlp'",
    ),
    "the state of another optimizer": (
        direct("muonclip", "grads", "of muon", "params"),
        "not one that init of muonclip made",
    ),
    "the state of muon for scale_by_muon": (
        direct("scale_by_muon", "grads", "of muon", "params"),
        "scale_by_muon",
    ),
    "arguments swapped": (
        direct("muon", "of muon", "grads", "params"),
        r"not one that init of muon made: call tx.update\(grads, state, params",
    ),
    "no params": (direct("muonclip", "grads", "state"), "needs the params"),
    "statistics are a list": (
        with_stats([1.0, 2.0]),
        "no statistics for the attention",
    ),
    "statistics are an array": (with_stats(jnp.ones(2)), "no statistics for the atten"),
    "statistics with their loss": (
        with_stats((np.float32(0), STATS)),
        "no statistics for .*'attn', only '1/attn/max_logits'",
    ),
    "a statistic is complex": (
        with_logits(jnp.ones(2) * 1j),
        "attn/max_logits' must be",
    ),
    "a statistic is None": (
        with_logits(None),
        "no statistics for the attention layers",
    ),
    **{
        f"statistics of shape {shape}": (
            with_logits(jnp.ones(shape)),
            r"'attn/max_logits' .*not fit the heads.*'attn/query/kernel' \(8, 2, 4",
        )
        for shape in ((3,), (1,), (4,), (1, 2), (3, 2))
    },
    "statistics of another layer, too": (
        with_stats(STATS | {"encoder": {"attn": STATS["attn"]}}),
        "'encoder/attn/max_logits'.*'attn'",
    ),
    **{
        f"statistics are {stats}": (
            with_stats(stats),
            "'attn'.*sow_weights=True.*variable_axes",
        )
        for stats in ({}, {"attn": {}})
    },
    "no statistics": (with_stats(None), "needs attention_stats.*attention_stats="),
    "no statistics for the function": (
        lambda: mc.clip_qk(PARAMS, None),
        "needs attention_stats",
    ),
    "a statistic of numbers": (with_logits([1.0, 400.0]), "are a scalar"),
    "a statistic is a name": (
        lambda: mc.clip_qk(PARAMS, {"attn": {"max_logits": "a"}}),
        "the statistics 'attn/max_logits' must be an array, got 'a'",
    ),
    "clip_qk's arguments swapped": (
        lambda: mc.clip_qk(STATS, PARAMS),
        r"params hold the statistics of 'attn': mc.clip_qk\(params, attention_stats\)",
    ),
    **{
        f"clip_qk takes no schedule for {name}": (
            lambda name=name: mc.clip_qk(PARAMS, STATS, **{name: lambda count: 0.5}),
            "takes no schedule",
        )
        for name in ("threshold", "alpha")
    },
    "describe None": (lambda: mc.describe(None), "describe needs the params, got None"),
    **{
        f"every {k} micro-batches": (
            lambda k=k: mc.multi_steps(mc.muonclip(1e-3), k),
            "every_k_schedule must be ",
        )
        for k in (0, -1, 2.5, None, True, "2", jnp.ones(2))
    },
    "multi_steps of a function": (
        lambda: mc.multi_steps(mc.muonclip, 2),
        "opt must be an optax.GradientTransformation.*got the function muonclip",
    ),
    "arguments of multi_steps swapped": (
        lambda: mc.multi_steps(2, mc.muonclip(1e-3)),
        "opt must be an optax.GradientTransformation.*got 2",
    ),
    "integers": (orthogonalize(jnp.ones((3, 3), int)), "needs floating-point .*int32"),
    "bools": (orthogonalize(jnp.ones((3, 3), bool)), "needs floating-point .*bool"),
    "a vector": (orthogonalize(jnp.ones(3)), r"needs floating-point .*shape \(3,\)"),
    "floats of 8 bits": (
        orthogonalize(jnp.ones((3, 3), "float8_e4m3fn")),
        "needs floating-point .*float8_e4m3fn",
    ),
    "nothing to orthogonalize": (orthogonalize(None), "x must be an array, got None"),
    "a tree": (orthogonalize({"w": QUERY}), "x must be an array, got {'w'"),
    "a mask of words": (attend(mask=["yes"] * 5), "mask must be an array, got"),
    "a mask that is added": (
        attend(mask=np.where(np.tri(5, dtype=bool), 0.0, -1e9)),
        "mask has negative numbers: .* bias=",
    ),
    "a mask as a bias": (attend(bias=np.tri(5, dtype=bool)), "bias has bools.* mask"),
    "a bias that is complex": (
        attend(bias=ones(5, dtype=complex)),
        "bias must be real",
    ),
    "a mask of another length": (
        attend(mask=jnp.ones(4, bool)),
        "mask .*not broadcast",
    ),
    "queries of integers": (
        lambda: mc.max_logits(QUERY.astype(int), KEY),
        "query int32, key float32: each needs a floating-point dtype",
    ),
    "a window of nothing": (attend(local_window_size=-3), "-3 hides every key"),
    "a window of three": (attend(local_window_size=(1, 2, 3)), "one number or a pair"),
    "a causal mask that is traced": (
        lambda: jax.jit(lambda x: mc.max_logits(QUERY, KEY, is_causal=x))(True),
        "is_causal must be True or False, known when tracing",
    ),
    "a kernel by name": (
        lambda: mc.attention_fn(QUERY, KEY, KEY, kernel="splash"),
        "kernel must be a function or None, got 'splash'",
    ),
    "keys of integers in a block": (
        lambda: mc.blockwise_attention(QUERY, KEY, KEY, block_size=2.0),
        "block_size must be a whole number from 1 on",
    ),
}


def _step_on_a_module():
    arrays, tx = {"up": jnp.ones((4, 8))}, mc.muon(1e-3)
    module = arrays | {"activation": jax.nn.relu}
    return tx.update(arrays, tx.init(arrays), module)


@pytest.mark.parametrize("row", WRONG)
def test_wrong_usage(row):
    call, message = WRONG[row]
    with pytest.raises(ValueError, match=message):
        call()


#: What looks wrong, and why it is not.
RIGHT = {
    "a negative rate ascends, as in optax": clip(learning_rate=-1.0),
    "a negative decay grows, as in optax": clip(weight_decay=-0.1),
    "numbers of NumPy and JAX are numbers": clip(
        beta=jnp.float32(0.9), weight_decay=np.float64(0.1), adam_eps=np.array(1e-8)
    ),
    "a whole number may be JAX's": polynomials(steps=jnp.array(5)),
    "a flag may be NumPy's": clip(nesterov=np.bool_(False)),
    "as many steps as are stable": polynomials(steps=50),
    "coefficients may be an array": polynomials(
        coeffs=jnp.array([3.4445, -4.775, 2.0315])
    ),
    "or one for each step": polynomials(
        coeffs=np.array([[3.4445, -4.775, 2.0315]] * 5)
    ),
    "beta of 1 keeps all": clip(beta=1.0),
    "JAX says that float64 is off": clip(mu_dtype="float64"),
    "params of 8 bits with momentum of 16": of_dtype(
        "float8_e4m3fn", mu_dtype="bfloat16"
    ),
    "an infinite threshold watches": clip(threshold=float("inf")),
    "statistics may be integers": with_logits(np.array([1, 400])),
    "and those of a model without attention an empty tree": lambda: update(
        mc.muonclip(1e-3), PARAMS["mlp"], PARAMS["mlp"], {}
    ),
    "there may be no params": lambda: update(mc.muon(1e-3), {}, {}, {}),
    "and no rows in the table": lambda: mc.describe({}),
    "one layer is a sequence of one": clip(
        attention=mc.AttentionLayer("attn", (QUERY_LEAF,), (KEY_LEAF,))
    ),
    "nested lists are an array": orthogonalize([[1.0, 2.0], [3.0, 4.0]]),
    "a stack may be empty": orthogonalize(jnp.ones((0, 3, 4))),
    "and so may matrices": orthogonalize(jnp.ones((0, 3))),
    "numbers as a mask are true or not": attend(mask=np.arange(5)),
    "a batch may be counted by NumPy": lambda: mc.multi_steps(
        mc.muonclip(1e-3), np.int64(2)
    ),
    "a decay mask may be a prefix, and lack entries": clip(
        weight_decay_mask={"attn": None, "mlp": np.bool_(True)}
    ),
    "a function of layers may be a static argument": lambda: update(
        optax.inject_hyperparams(mc.qk_clip, "attention")(
            attention=mc.flax_attention_layers
        )
    ),
    # optax hands its numbers over as arrays, and flags as they are.
    "all of it injected": lambda: update(
        optax.inject_hyperparams(mc.muonclip)(
            1e-3,
            beta=lambda count: 0.9,
            orthogonalizer=mc.NewtonSchulz(steps=3),
            neuron_b2=0.9,
            consistent_rms=0.2,
            threshold=lambda count: 50.0,
        )
    ),
}


@pytest.mark.parametrize("row", RIGHT)
def test_what_is_not_wrong(row):
    RIGHT[row]()
