"""The package's names as a newcomer meets them: imported, completed, in help()."""

import inspect
import pickle
import pydoc
import re
import subprocess
import sys

import numpy as np
import optax
import pytest
from helpers import script_environment

import muonclip_jax as mc


FUNCTIONS = dict(inspect.getmembers(mc, inspect.isfunction))

WITHOUT_FLAX = """
import sys
import jax.numpy as jnp
import muonclip_jax as mc

tx = mc.muon(1e-3)
params = {"w": jnp.ones((2, 3))}
tx.update(params, tx.init(params), params)
assert "flax" not in sys.modules and "attention_fn" in dir(mc)

from muonclip_jax import attention_fn
assert "flax" in sys.modules and attention_fn is mc.attention_fn
"""

# On a platform that is not there: whatever asks for a device raises.
CHANGES_NOTHING = """
import warnings
import jax, optax

before, filters = dict(jax.config.values), list(warnings.filters)
warnings.simplefilter("error")
import muonclip_jax
warnings.filters.pop(0)
assert jax.config.values == before and warnings.filters == filters
"""


@pytest.mark.parametrize(
    "code, platform", [(WITHOUT_FLAX, "cpu"), (CHANGES_NOTHING, "none_such")]
)
def test_importing_takes_and_changes_no_more_than_it_needs(code, platform):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=script_environment() | {"JAX_PLATFORMS": platform},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_completion_shows_is_what_there_is():
    star: dict = {}
    exec("from muonclip_jax import *", star)
    assert star.keys() - {"__builtins__"} == set(mc.__all__)
    assert dir(mc) == sorted(mc.__all__) and len(FUNCTIONS) > 20
    with pytest.raises(AttributeError, match="'muonclip_jax' has no attribute 'mun'"):
        _ = mc.mun


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_is_short(name):
    """Types by name, no addresses, arguments in the order of the signature."""
    function = FUNCTIONS[name]
    text = pydoc.plain(pydoc.render_doc(function))
    assert " at 0x" not in text
    parameters = inspect.signature(function).parameters
    # Without modules: where JAX has its array differs from version to version.
    shown = (re.sub(r"(\w+\.)+", "", str(x)) for x in parameters.values())
    assert all(len(x) < 100 for x in shown)
    bullets = re.findall(r"^- ((?:`\w+`(?:, )?)+):", inspect.getdoc(function), re.M)
    named = re.findall(r"`(\w+)`", " ".join(bullets))
    own = [x for x in named if x in parameters]
    assert own == sorted(own, key=list(parameters).index)


def test_help_of_the_system_fits_a_screen():
    assert len(pydoc.render_doc(mc.muonclip).splitlines()) < 60


def test_default_beta_is_a_schedule_and_a_value():
    beta = inspect.signature(mc.muon).parameters["beta"].default
    assert repr(beta) == "rising from 0.85 to 0.95 over 300 steps"
    again = pickle.loads(pickle.dumps(beta))
    assert callable(again) and again == beta and hash(again) == hash(beta)
    steps = np.array([0, 150, 300, 1000])
    # Two roundings of float32, of numbers below 1.
    np.testing.assert_allclose(beta(steps), [0.85, 0.9, 0.95, 0.95], atol=2**-23)
    np.testing.assert_array_equal(
        beta(steps), optax.linear_schedule(0.85, 0.95, 300)(steps)
    )
    state = optax.inject_hyperparams(mc.muon)(1e-3).init({"w": np.ones((2, 3))})
    np.testing.assert_allclose(state.hyperparams["beta"], 0.85, atol=2**-23)
