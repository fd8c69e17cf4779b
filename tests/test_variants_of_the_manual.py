"""The variants in docs/tuning_variants.md, against their definitions in float64."""

import ast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import polynomial_of, ROOT, trained
from test_manual import blocks

import muonclip_jax as mc


pytestmark = pytest.mark.usefixtures("fast_compilation")

RATE, STEPS = 0.01, 3
KELLER = mc.NS_COEFFS["keller"]


@pytest.fixture(scope="module")
def page():
    """The names that the page defines, without the steps that it takes."""
    found: dict = {}
    for block in blocks(ROOT / "docs/tuning_variants.md"):
        if block.kind == "python":
            for node in ast.parse(block.code).body:
                if not isinstance(node, ast.Expr | ast.For) and not takes_steps(node):
                    exec(ast.unparse(node), found)
    return found


def takes_steps(node):
    return isinstance(node, ast.Assign) and "steps(" in ast.unparse(node)


def gradients(page, step):
    generator = np.random.default_rng(step)
    return {k: generator.normal(size=p.shape) for k, p in page["params"].items()}


def followed(page, tx):
    """The params after some steps of the gradients above."""
    each = (jax.tree.map(jnp.float32, gradients(page, i)) for i in range(STEPS))
    return trained(tx, page["params"], each)[0]


def compared(page, tx, name, rule):
    """Whether a parameter follows a rule, a generator of `w` that is sent gradients."""
    steps = rule(np.asarray(page["params"][name], np.float64))
    w = next(steps)
    for step in range(STEPS):
        w = steps.send(gradients(page, step)[name])
    start = page["params"][name]
    after = followed(page, tx)[name]
    atol = 1e-4 * abs(w - start).max()
    np.testing.assert_allclose(after - start, w - start, atol=atol)


def unit(x):
    return x / np.linalg.norm(x)


def muonh(w):
    radius, m = np.linalg.norm(w), 0.0
    for step in range(STEPS + 1):
        g = yield w
        beta = 0.85 + 0.1 * step / 300
        m = beta * m + g
        u = unit(polynomial_of(g + beta * m, KELLER))
        w = radius * unit(w - RATE * radius * u)


def adamuon(w):
    m, v = 0.0, 0.0
    while True:
        g = yield w
        m = 0.95 * m + g
        direction = polynomial_of(np.sign(m), KELLER)
        v = 0.95 * v + 0.05 * direction**2
        u = unit(direction / np.sqrt(v)) * 0.2 * np.sqrt(w.size)
        w = w - RATE * (u + 0.1 * w)


def muon2(w):
    m, v, step = 0.0, 0.0, 0
    while True:
        g = yield w
        step += 1
        m, v = 0.95 * m + 0.05 * g, 0.95 * v + 0.05 * g**2
        corrected = 1 - 0.95**step
        x = m / corrected / np.sqrt(v / corrected)
        u = 0.2 * np.sqrt(max(w.shape)) * polynomial_of(x, KELLER[:3])
        w = w - RATE * (u + 0.1 * w)


def scion(corner, radius):
    def rule(w):
        m = 0.0
        while True:
            g = yield w
            m = 0.9 * m + 0.1 * g
            w = (1 - RATE) * w - RATE * radius * corner(m)

    return rule


def spectral(m):
    return np.sqrt(m.shape[1] / m.shape[0]) * polynomial_of(m, KELLER)


@pytest.mark.parametrize("name", ["up", "down"])
@pytest.mark.parametrize("rule", [muonh, adamuon, muon2])
def test_matrices_follow_the_definition(page, rule, name):
    tx = page[rule.__name__](RATE, page["reading"])
    compared(page, page["with_adamw"](tx, RATE), name, rule)


@pytest.mark.parametrize(
    ("name", "corner", "radius"),
    [
        ("up", spectral, 50.0),
        ("down", spectral, 50.0),
        ("embed", lambda m: np.sign(m) / 8, 3000.0),
        ("head", lambda m: np.sign(m) / 8, 3000.0),
        ("gain", lambda m: m / np.sqrt(np.mean(m**2)), 50.0),
    ],
)
def test_scion_moves_to_the_corners_of_its_balls(page, name, corner, radius):
    tx = page["scion"](RATE, page["reading"])
    compared(page, tx, name, scion(corner, radius))
