"""A run in numbers: each against what NumPy says of the same state."""

import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import NNXModel, normal, ROOT
from test_manual import blocks

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

KERNEL = (8, 2, 4)
PARAMS = {
    "embed": {"embedding": normal(0, 32, 8)},
    "layers": {"attn": {"query": {"kernel": normal(1, 3, *KERNEL)}}},
    "up": {"kernel": normal(3, 8, 16), "bias": normal(4, 16)},
}
PARAMS["layers"]["attn"]["key"] = {"kernel": normal(2, 3, *KERNEL)}
STACKED = {"dimension_numbers": {"layers/*": mc.MuonDimensionNumbers(1, (2, 3))}}
LOGITS = np.asarray([[5.0, 400.0], [np.inf, 7.0], [120.0, 2.0]], np.float32)
STATS = {"layers": {"attn": {"max_logits": jnp.asarray(LOGITS)}}}


def one_step(tx):
    grads = jax.tree.map(lambda x: x[..., ::-1], PARAMS)
    return tx.update(grads, tx.init(PARAMS), PARAMS, attention_stats=STATS)


def norm(*leaves):
    return np.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in leaves))


def test_every_number_by_hand():
    tx = optax.inject_hyperparams(mc.muonclip)(
        optax.constant_schedule(0.1), beta=0.8, ns_steps=2, **STACKED
    )
    updates, state = one_step(tx)
    found = mc.scalars(state, PARAMS, updates=updates, **STACKED)
    assert json.loads(json.dumps(found)) == found  # Python's own numbers
    finite = LOGITS[np.isfinite(LOGITS)]
    expected = {
        "max_logit": finite.max(),
        "max_logit/layers/attn": finite.max(),
        "num_clipped": (finite > 100).sum(),
        "num_nonfinite": 1,
        "clipped_fraction": 2 / 6,
        "ever_clipped_fraction": 2 / 6,
        "hyperparams/learning_rate": 0.1,
        "hyperparams/beta": 0.8,
    }
    for kind, tree in (("param_norm", PARAMS), ("update_norm", updates)):
        attn = [tree["layers"]["attn"][name]["kernel"] for name in ("query", "key")]
        expected |= {
            f"{kind}/matrix": norm(*attn, tree["up"]["kernel"]),
            f"{kind}/embedding": norm(tree["embed"]["embedding"]),
            f"{kind}/vector": norm(tree["up"]["bias"]),
        }
    for name, number in expected.items():
        np.testing.assert_allclose(found[name], number, rtol=1e-5, err_msg=name)
    others = found.keys() - expected.keys()
    assert all(name.startswith("hyperparams/") for name in others)


def test_without_attention_and_under_jit():
    tx = mc.muon(0.1, ns_steps=2, **STACKED)
    _, state = one_step(tx)
    found = mc.scalars(state, PARAMS, **STACKED)
    assert {name.split("/")[0] for name in found} == {"param_norm"}
    traced = jax.jit(lambda s, p: mc.scalars(s, p, **STACKED))(state, PARAMS)
    assert found.keys() == traced.keys()
    for name in found:
        np.testing.assert_allclose(found[name], traced[name], rtol=1e-6)


def test_of_an_nnx_optimizer():
    model = NNXModel(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, mc.muon(0.1, ns_steps=1), wrt=nnx.Param)
    params = nnx.state(model, nnx.Param)
    found = mc.scalars(optimizer.opt_state, params)
    leaves = jax.tree.leaves(params)
    squares = sum(x**2 for name, x in found.items() if name.startswith("param_norm"))
    np.testing.assert_allclose(np.sqrt(squares), norm(*leaves), rtol=1e-5)


def test_a_state_of_other_params_is_refused():
    _, state = one_step(mc.muonclip(0.1, ns_steps=1, **STACKED))
    other = {"attn": {name: {"kernel": jnp.ones(KERNEL)} for name in ("query", "key")}}
    with pytest.raises(ValueError, match="the optimizer state holds 6 heads"):
        mc.scalars(state, other)


def test_the_loggers_of_the_manual_take_the_numbers(monkeypatch):
    """Its blocks for wandb and TensorBoard, with a stand-in for either library."""
    logged = []

    def log(*args, **options):
        (numbers,) = (x for x in args if isinstance(x, dict))
        logged.append(json.loads(json.dumps(numbers)))

    run = types.SimpleNamespace(log=log)
    writer = types.SimpleNamespace(write_scalars=log)
    writers = types.SimpleNamespace(create_default_writer=lambda path: writer)
    stand_ins = {
        "wandb": types.SimpleNamespace(init=lambda **_: run),
        "clu": types.SimpleNamespace(metric_writers=writers),
    }
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    _, state = one_step(mc.muonclip(0.1, ns_steps=1, **STACKED))
    page = ROOT / "docs" / "logging.md"
    titled = [b for b in blocks(page) if b.kind == "python" and "Needs" in b.title]
    for block in titled:
        code = block.code.replace("model=reading", "**options")
        known = {"mc": mc, "state": state, "params": PARAMS, "loss": 1.5}
        exec(code, known | {"options": STACKED})
    assert len(logged) == len(titled) == 2
    assert logged[0]["loss"] == 1.5
    assert all(x["num_clipped"] == 2 for x in logged)
