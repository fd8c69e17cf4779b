"""The animation: a tiny one by the script, its frames, and the committed one."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from animation_frames import draw_logits, draw_spectrum
from helpers import EXAMPLES, run_script
from PIL import Image


def frames_of(file):
    """Milliseconds of each frame; equal frames in a row are stored as one."""
    with Image.open(file) as picture:
        assert picture.size == (800, 400)
        assert picture.info["loop"] == 0  # for ever
        for i in range(picture.n_frames):
            picture.seek(i)
            # An opaque white margin, which dark pages need.
            assert picture.convert("RGBA").getpixel((0, 0)) == (255, 255, 255, 255)
            yield picture.info["duration"]


@pytest.mark.more
def test_script_draws_a_tiny_gif(tmp_path):
    run_script(EXAMPLES / "animation.py", "--tiny", "--out", tmp_path / "tiny.gif")
    durations = list(frames_of(tmp_path / "tiny.gif"))
    assert sum(durations) == 10 * 100  # ten frames
    assert len(durations) > 5


def test_committed_gif_is_small_and_lasts_six_to_ten_seconds():
    file = EXAMPLES / "muonclip.gif"
    assert 6_000 <= sum(frames_of(file)) <= 10_000
    assert file.stat().st_size < 2_000_000


@pytest.fixture
def axes():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def test_dots_are_the_singular_values_wherever_a_step_ends(axes):
    spectra = np.random.default_rng(0).uniform(0.1, 1.2, (6, 8))
    show = draw_spectrum(axes, spectra)
    for step in (0, 3, 1, 5):
        show(step / 5)
        np.testing.assert_allclose(axes.lines[-1].get_ydata(), spectra[step])
        assert axes.get_title().endswith(f"step {step} of 5")


def test_every_head_is_drawn_up_to_the_step_that_is_reached(axes):
    unclipped = np.random.default_rng(0).uniform(1, 30, (11, 3))
    clipped = np.minimum(unclipped, 10)
    show = draw_logits(axes, unclipped, clipped, 10.0)
    expected = [*unclipped.T, *clipped.T]
    for progress, steps in ((0.0, 1), (0.5, 6), (1.0, 11)):
        show(progress)
        for line, head in zip(axes.lines, expected, strict=False):
            np.testing.assert_array_equal(line.get_xydata()[:, 1], head[:steps])
    assert axes.get_ylim()[1] > unclipped.max()
