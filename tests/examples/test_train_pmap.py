"""The example for pmap: the losses of one device, and the script itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_lm_loop as train_lm
import train_pmap
from flax import nnx
from helpers import EXAMPLES, run_script


pytestmark = pytest.mark.usefixtures("fast_compilation")
SMALL = ["--steps=12", "--batch-size=4", "--context=16", "--layers=1", "--width=16"]
SMALL += ["--heads=2", "--threshold=0.3"]  # low, so that the clip acts


@pytest.fixture
def args(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 3000)
    return train_pmap.parse_args([*SMALL, "--data", str(text)])


def on_one_device(args):
    """The losses of train_lm.py's own step, which knows of no axes."""
    corpus, model = train_lm.Corpus(args.data), train_lm.make_model(args)
    tx = train_lm.make_optimizer("muonclip", args)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses, clipped = [], 0
    for step in range(args.steps):
        tokens = corpus.batch(args.batch_size, args.context, seed=args.seed, step=step)
        metrics = train_lm.train_step(model, optimizer, jnp.asarray(tokens))
        losses.append(metrics.loss.item())
        clipped += metrics.clipped.item()
    return losses, clipped


@pytest.mark.more
def test_losses_are_those_of_one_device_on_the_whole_batch(args):
    devices = jax.local_devices()[:2]
    expected, clipped = on_one_device(args)
    assert clipped > 0
    np.testing.assert_allclose(train_pmap.train(args, devices), expected, rtol=1e-4)


def test_batch_must_be_divisible(args):
    args.batch_size = 5
    with pytest.raises(SystemExit, match="--batch-size 5 is not divisible by 2 dev"):
        train_pmap.train(args, jax.local_devices()[:2])


@pytest.mark.more
def test_script(args):
    script = [EXAMPLES / "train_pmap.py", "--data", args.data, *SMALL]
    result = run_script(*script, "--simulate-devices=4")
    assert result.stdout.startswith("final loss ")
    assert result.stdout.endswith(" on 4 devices\n")
