"""The blocks of the manual's page for Keras run, and the clip bounds the logits."""

import runpy

import jax
import numpy as np
from helpers import ROOT

import muonclip_jax as mc


def test_the_page_trains(tmp_path):
    page = (ROOT / "docs" / "libraries.md").read_text()
    blocks = [x.split("```")[0] for x in page.split('```python title="Keras ')[1:]]
    code = "\n".join(block.split("\n", 1)[1] for block in blocks)
    file = tmp_path / "page.py"
    file.write_text(code)
    found = runpy.run_path(str(file))
    assert len(blocks) == 2 and len(found["reading"].attention) == 1
    losses = found["model"].history.history["loss"]
    assert losses[-1] < losses[0]
    # The logits of the same seeds, before a clip and after it.
    model, tokens = found["model"], found["tokens"]
    params = {v.path: v.value for v in model.trainable_variables}
    others = [v.value for v in model.non_trainable_variables]
    stats = found["recorded"](params, others, tokens)[1][1]
    (before,) = jax.tree.leaves(stats)
    threshold = float(np.median(before))
    clipped = mc.clip_qk(params, stats, threshold, model=found["reading"])
    (after,) = jax.tree.leaves(found["recorded"](clipped, others, tokens)[1][1])
    np.testing.assert_allclose(after, np.minimum(before, threshold), rtol=1e-4)
    # What the page says of saving: weights and momentum come back.
    keras, file = found["keras"], tmp_path / "model.keras"
    model.save(file)
    loaded = keras.models.load_model(file, compile=False)
    tx = mc.muon(2e-3, model=found["reading"])
    loaded.compile(optimizer=found["Optax"](tx), loss=found["loss"])
    loaded.optimizer.build(loaded.trainable_variables)
    loaded.load_weights(file)
    for of in (lambda m: m.trainable_variables, lambda m: m.optimizer.variables):
        for saved, restored in zip(of(model), of(loaded), strict=True):
            np.testing.assert_array_equal(restored.value, saved.value, saved.path)
