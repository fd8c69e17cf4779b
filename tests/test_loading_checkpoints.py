"""What restoring a state may do: Orbax and msgpack read arrays and run no code."""

import pickle
import sys

import chex
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import muonclip_jax as mc


HEADS = {"kernel": jnp.ones((8, 2, 4))}
PARAMS = {
    "attn": {"query": HEADS, "key": HEADS},
    "mlp": {"kernel": jnp.ones((8, 16), jnp.bfloat16)},
}


def by_orbax(folder, state, like):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", jax.eval_shape(lambda: like))


def by_msgpack(_, state, like):
    return serialization.from_bytes(like, serialization.to_bytes(state))


def by_pickle(_, state, like):
    return pickle.loads(pickle.dumps(state))


@pytest.fixture
def unpickled():
    """The names that Python looks up for pickles, in all threads."""
    names, listening = [], True

    def hear(event, arguments):
        if listening and event == "pickle.find_class":
            names.append(arguments)

    sys.addaudithook(hear)  # for as long as Python runs
    yield names
    listening = False


@pytest.mark.parametrize("restored", [by_orbax, by_msgpack, by_pickle])
def test_only_pickle_unpickles(tmp_path, unpickled, restored):
    tx = mc.muonclip(1e-2)
    state = tx.init(PARAMS)
    other = jax.tree.map(jnp.zeros_like, state)
    chex.assert_trees_all_equal(restored(tmp_path, state, other), state)
    assert bool(unpickled) == (restored is by_pickle)


@pytest.mark.parametrize("restored", [by_orbax, by_msgpack])
def test_other_leaves_are_refused(tmp_path, restored):
    with pytest.raises(ValueError):
        restored(tmp_path, {"a": jnp.ones(3)}, {"b": jnp.ones(3)})


def test_orbax_refuses_other_shapes_and_msgpack_takes_them(tmp_path):
    saved, like = {"a": jnp.ones((3, 4))}, {"a": jnp.ones((4, 4))}
    with pytest.raises(ValueError, match="shape"):
        by_orbax(tmp_path, saved, like)
    assert by_msgpack(tmp_path, saved, like)["a"].shape == (3, 4)
