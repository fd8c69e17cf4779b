"""What a type checker knows of public calls: `.ci/run` gives this file to pyright."""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import pytest

import muonclip_jax as mc


PARAMS = {name: jnp.ones((8, 2, 4)) for name in "qkv"}
X = jnp.ones((3, 8))


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("td,dhk->htk", x, params[name]) for name in "qkv")
    return jnp.sum(jax.nn.softmax(q @ k.mT) @ v)


def loss_and_rows(params: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, int]:
    return loss(params, x), len(x)


def test_recorded_functions_have_the_types_of_what_they_record():
    recorded = mc.record_attention(loss)
    assert_type(recorded(PARAMS, X), tuple[jax.Array, Any])
    both = mc.record_attention(loss_and_rows, has_aux=True)(PARAMS, X)
    assert_type(both, tuple[jax.Array, tuple[int, Any]])
    assert both[1][0] == 3
    with pytest.raises(TypeError):
        recorded(PARAMS)  # pyright: ignore[reportCallIssue]


def test_a_name_that_is_imported_late_has_its_type():
    query = jnp.ones((1, 3, 2, 4))
    assert_type(mc.attention_fn(query, query, query), jax.Array)
    with pytest.raises(TypeError):
        mc.attention_fn(query)  # pyright: ignore[reportCallIssue]
