"""The algorithm on one screen against the package, over twenty steps."""

import sys

import jax
import numpy as np
import optax
import pytest
from helpers import EXAMPLES, run_script

import muonclip_jax as mc


sys.path.insert(0, str(EXAMPLES))
import muonclip_in_one_file as one_file


THRESHOLD = 0.8
FILE = EXAMPLES / "muonclip_in_one_file.py"


@pytest.mark.more
def test_the_package_takes_the_same_twenty_steps(monkeypatch):
    """In float64, in which neither rounds what the other does not."""
    monkeypatch.setattr(one_file, "WIDTH", 16)
    with jax.enable_x64(True):
        params = start = one_file.init_params(jax.random.key(0))
        text = np.frombuffer(FILE.read_bytes(), np.uint8).astype(np.int32)
        batches = [
            one_file.batch_of(jax.numpy.asarray(text), jax.random.key(i), 2, 12)
            for i in range(20)
        ]
        state, fired = one_file.init(params), 0
        for tokens in batches:
            params, state, _, largest = one_file.train_step(
                params, state, tokens, 0.01, THRESHOLD
            )
            fired += sum(int((x > THRESHOLD).sum()) for x in largest.values())
        expected = params
        assert fired > 20

        def loss(params, tokens):
            return one_file.loss(params, tokens)[0]

        model = mc.read_model(loss, start, batches[0])
        tx = mc.muonclip(
            0.01,
            threshold=THRESHOLD,
            model=model,
            beta=0.95,
            nesterov=False,
            per_head=False,
        )
        recorded = mc.record_attention(loss)

        @jax.jit
        def step(params, state, tokens):
            (_, stats), grads = jax.value_and_grad(recorded, has_aux=True)(
                params, tokens
            )
            updates, state = tx.update(grads, state, params, attention_stats=stats)
            return optax.apply_updates(params, updates), state

        params, state = start, tx.init(start)
        for tokens in batches:
            params, state = step(params, state, tokens)
        for name, x in params.items():
            np.testing.assert_allclose(x, expected[name], rtol=0, atol=1e-6)
            moved = np.abs(x - start[name]).max()
            assert moved > 1e-2, name


@pytest.mark.more
def test_it_learns_by_itself_and_fits_one_screen():
    lines = FILE.read_text().splitlines()
    assert len(lines) <= 150
    imports = [x for x in lines if x.startswith(("import ", "from "))]
    assert {x.split()[1].split(".")[0] for x in imports} == {"math", "pathlib", "jax"}
    printed = run_script(FILE).stdout.splitlines()
    first, last = (float(printed[i].split("loss ")[1].split(",")[0]) for i in (0, -1))
    assert last < 0.6 * first


def test_the_manual_shows_the_same_lines():
    code = FILE.read_text()
    shown = code[code.index("KELLER = ") : code.index("# A model to try it on.")]
    page = (EXAMPLES.parent / "docs" / "how_it_works.md").read_text()
    assert shown.strip() in page
