"""Muon of four PyTorch repositories, from its first step and from its momentum."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import one_at_a_time, ROOT, step_of
from test_muon import check_against_torch

import muonclip_jax as mc


RECORDED = np.load(ROOT / "tests/data/torch_optimizers.npz")
BETA = 0.95
STEPS = 5


def shrunk(steps, factor, first=True):
    """Steps of `x / factor`, all of them or the first alone."""
    factors = [factor] + [1.0 if first else factor] * (len(steps) - 1)
    return tuple(
        (a / f, b / f**3, c / f**5) for (a, b, c), f in zip(steps, factors, strict=True)
    )


#: Polar Express as dion, nanochat and modded-nanogpt have it.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
DION = shrunk(POLAR_EXPRESS, 1.02)  # which dion divides the norm by
#: As Dao AI Lab has it, with a safety factor in every step.
DAO = shrunk(
    (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    ),
    1.05,
    first=False,
)

#: The rows of the table in docs/from_torch.md, by the name of what was recorded.
ROWS = {
    "keller": "Keller Jordan's `Muon`",
    "moonlight": "Moonlight",
    "dion_default": "dion's `Muon`, its defaults",
    "dion_rms_norm": "dion's `Muon(..., adjust_lr=",
    "dao": "Dao AI Lab's",
}
OF_TORCH = {
    "original_nesterov": "`torch.optim.Muon`, with",
    "match_rms_adamw_nesterov": "`torch.optim.Muon(...,",
    "match_rms_adamw_heavyball": "Kimi K2's Algorithm 1",
}


def settings(row):
    """What the manual says of a Muon, but with the recorded weight decay."""
    page = (ROOT / "docs/from_torch.md").read_text()
    (line,) = [x for x in page.splitlines() if x.startswith(f"| {row}")]
    code = line.strip("| ").split(" | ")[1].strip("`")
    found = eval(f"dict({code})", {"mc": mc, "DION": DION, "DAO": DAO})
    return found | {"weight_decay": 0.1}


def recorded(name, step):
    """`{"0": (in, out), "1": ...}`, as Flax has kernels."""
    return {str(j): jnp.asarray(RECORDED[f"{name}_{j}"][step].T) for j in range(2)}


@pytest.mark.parametrize("name, first", one_at_a_time(list(ROWS), [0, 2]))
def test_follows(name, first):
    params = recorded(f"{name}_params", first)
    tx = mc.muon(0.02, **settings(ROWS[name]))
    # Keller Jordan averages gradients, as torch.optim.Muon does; the others add them.
    factor = 1 / (1 - BETA) if name == "keller" else 1.0
    momentum = {k: factor * m for k, m in recorded(f"{name}_momentum", first).items()}
    state = optax.tree.set(tx.init(params), is_of_muon, mu=momentum)
    for step in range(first, STEPS):
        params, state = step_of(tx)(recorded("grads", step), state, params)
    for k, expected in recorded(f"{name}_params", STEPS).items():
        np.testing.assert_allclose(params[k], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", OF_TORCH)
def test_follows_torch_by_the_settings_of_the_manual(name):
    """Kimi K2's algorithm has no public code; it is torch's without Nesterov."""
    check_against_torch(mc.muon(0.02, **settings(OF_TORCH[name])), name)


BLOCKS = mc.MatrixAxes(1, 0, parts=(32, 20, 12))
SPLITS = {
    "blocks_rms": dict(axes=BLOCKS),
    "blocks_spectral": dict(axes=BLOCKS, consistent_rms="mup"),
    "heads_rms": dict(axes=mc.MatrixAxes(1, 0, head_dim=8)),
    # NorMuon's neurons are outputs there, and are here where they are the longer side.
    "normuon": dict(axes=mc.MatrixAxes(1, 0, parts=(32, 28, 36)), neuron_b2=0.95),
}


@pytest.mark.parametrize("name", SPLITS)
def test_cuts_as_dion_does(name):
    """`split_sizes` and `num_heads`: rows of a kernel of `(out, in)` apart."""
    splits = np.load(ROOT / "tests/data/torch_splits.npz")
    options = dict(SPLITS[name])
    numbers = {"w": options.pop("axes")}
    options |= {"weight_decay": 0.1, "beta": BETA, "dimension_numbers": numbers}
    tx = mc.muon(0.02, **options)
    before, *after = splits[f"{name}_params"]
    params = {"w": jnp.asarray(before)}
    state = tx.init(params)
    for grads, expected in zip(splits[f"{name}_grads"], after, strict=True):
        params, state = step_of(tx)({"w": jnp.asarray(grads)}, state, params)
        np.testing.assert_allclose(params["w"], expected, rtol=0, atol=2e-6)


def is_of_muon(path, value):
    del value
    return "ScaleByMuonState" in str(path)
