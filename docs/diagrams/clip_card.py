"""Four heads, as QK-Clip sees them, scales them, and would see them again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from card import ACCENT, Card, COLORS, FAINT, GRAY, INK

import muonclip_jax as mc


LOGITS, THRESHOLD = (60.0, 180.0, 95.0, 400.0), 100.0
TOP, HEIGHT, BAR, PITCH = 96, 150, 30, 44
PANELS = {"before": 64, "gamma": 276, "after": 758}
COLUMNS = {  # of the table, with what is in them
    "gamma": (80, "threshold / S"),
    "query": (204, "gamma^alpha"),
    "key": (344, "gamma^(1-alpha)"),
}


def clip_card() -> Card:
    gamma, scales = clipped()
    title = "QK-Clip, head by head"
    card = Card(956, TOP + HEIGHT + 36, title)
    _draw_logits(card, PANELS["before"], "largest logit S of this batch", LOGITS)
    _draw_scales(card, PANELS["gamma"], gamma, scales)
    after = np.asarray(LOGITS) * scales.prod(axis=0)
    _draw_logits(card, PANELS["after"], "the same batch afterwards", after)
    return card


def clipped() -> tuple[np.ndarray, np.ndarray]:
    """Gamma of each head, and what its query and its key were multiplied by."""
    kernel = jnp.ones((8, len(LOGITS), 4))
    params = {"attn": {"query": {"kernel": kernel}, "key": {"kernel": kernel}}}
    stats = {"attn": {"max_logits": jnp.array(LOGITS)}}
    tx, zeros = mc.qk_clip(THRESHOLD), jax.tree.map(jnp.zeros_like, params)
    updates, state = tx.update(zeros, tx.init(params), params, attention_stats=stats)
    weights: Any = optax.apply_updates(params, updates)
    scales = [weights["attn"][name]["kernel"][0, :, 0] for name in ("query", "key")]
    gamma = optax.tree.get(state, "gamma")
    return np.asarray(gamma), np.asarray(scales)


def _draw_logits(card: Card, x: float, title: str, logits) -> None:
    bottom, unit = TOP + HEIGHT, HEIGHT / max(LOGITS)
    card.text(x + 2 * PITCH - 9, TOP - 34, title, bold=True)
    level = bottom - THRESHOLD * unit
    card.line(x - 10, level, x + 4 * PITCH - 6, level, color=ACCENT, dashed=True)
    card.text(x - 13, level, f"{THRESHOLD:.0f}", color=ACCENT, anchor="end")
    card.text(x - 13, bottom + 14, "head", color=GRAY, anchor="end")
    for head, logit in enumerate(logits):
        left, height = x + head * PITCH, float(logit) * unit
        card.mark(left, bottom - height, BAR, height, COLORS[head])
        # Its number stands on white, since the line may run through it.
        card.mark(left, bottom - height - 19, BAR, 18, "#ffffff")
        card.text(left + BAR / 2, bottom - height - 9, f"{logit:.0f}")
        card.text(left + BAR / 2, bottom + 14, f"{head}", color=GRAY)
    card.line(x - 10, bottom, x + 4 * PITCH - 6, bottom, color=FAINT)


def _draw_scales(card: Card, x: float, gamma: np.ndarray, scales: np.ndarray) -> None:
    for words, (at, below) in COLUMNS.items():
        card.text(x + at, TOP - 34, words, bold=True)
        card.text(x + at, TOP - 13, below, color=GRAY)
    for head, value in enumerate(gamma):
        y = TOP + 20 + head * 34
        card.mark(x + 6, y - 8, 16, 16, COLORS[head])
        card.text(x + COLUMNS["gamma"][0], y, f"{value:.2f}" if value < 1 else "1")
        for name, scale in zip(("query", "key"), scales[:, head], strict=True):
            words = f"{scale:.2f}" if scale != 1 else "unchanged"
            card.text(x + COLUMNS[name][0], y, words, color=GRAY if scale == 1 else INK)
    for left, right in ((x - 32, x - 8), (x + 416, x + 440)):
        card.arrow(left, TOP + HEIGHT / 2, right, TOP + HEIGHT / 2)
