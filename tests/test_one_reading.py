"""A trace reads the paths of each tree once: gradients, params, statistics."""

import jax
import jax.numpy as jnp
import pytest
from internals import paths

import muonclip_jax as mc


KERNEL = jnp.ones((8, 2, 4))
PARAMS = {
    f"layer_{i}": {"query": {"kernel": KERNEL}, "key": {"kernel": KERNEL}}
    for i in range(2)
}
STATS = {name: {"max_logits": jnp.ones(2)} for name in PARAMS}


@pytest.mark.parametrize(
    ("make", "trees"),
    [
        (lambda: mc.muonclip(1e-3), 3),
        # optax traces the update for either outcome of a step that may be skipped.
        (lambda: mc.multi_steps(mc.muonclip(1e-3), 2), 2 + 2 * 2),
    ],
)
def test_an_update_reads_each_tree_once(monkeypatch, make, trees):
    tx, read, flatten = make(), [], paths.flatten
    state = tx.init(PARAMS)
    monkeypatch.setattr(
        paths, "flatten", lambda *args, **kw: read.append(args) or flatten(*args, **kw)
    )
    jax.eval_shape(tx.update, PARAMS, state, PARAMS, attention_stats=STATS)
    assert len(read) == trees
