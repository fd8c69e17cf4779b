"""Four heads, as QK-Clip sees them, scales them, and would see them again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from card import ACCENT, Card, COLORS, FAINT, GRAY, INK

import muonclip_jax as mc


LOGITS, THRESHOLD = (60.0, 180.0, 95.0, 400.0), 100.0
TOP, HEIGHT, BAR, PITCH = 92, 150, 26, 44
PANELS = {"before": 56, "gamma": 276, "after": 724}


def clip_card() -> Card:
    gamma, scales = clipped()
    title = "QK-Clip, head by head"
    card = Card(912, TOP + HEIGHT + 36, title)
    card.text(24, 26, title, size=16, anchor="start", bold=True)
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
    card.text(x + 2 * PITCH - 9, TOP - 32, title, size=12.5, bold=True)
    for head, logit in enumerate(logits):
        left, height = x + head * PITCH, float(logit) * unit
        card.mark(left, bottom - height, BAR, height, COLORS[head])
        card.text(left + BAR / 2, bottom - height - 9, f"{logit:.0f}", size=11)
        card.text(left + BAR / 2, bottom + 14, f"head {head}", size=11, color=GRAY)
    card.line(x - 10, bottom, x + 4 * PITCH - 6, bottom, color=FAINT)
    level = bottom - THRESHOLD * unit
    card.line(x - 10, level, x + 4 * PITCH - 6, level, color=ACCENT, dashed=True)
    card.text(x - 13, level, f"{THRESHOLD:.0f}", size=11, color=ACCENT, anchor="end")


def _draw_scales(card: Card, x: float, gamma: np.ndarray, scales: np.ndarray) -> None:
    for words, at in (("gamma", 50), ("query", 154), ("key", 298)):
        card.text(x + at + 30, TOP - 32, words, size=12.5, bold=True)
    card.text(x + 80, TOP - 12, "threshold / S", size=11, color=GRAY)
    card.text(x + 184, TOP - 12, "times gamma^alpha", size=11, color=GRAY)
    card.text(x + 328, TOP - 12, "times gamma^(1-alpha)", size=11, color=GRAY)
    for head, value in enumerate(gamma):
        y = TOP + 20 + head * 34
        card.mark(x + 6, y - 8, 16, 16, COLORS[head])
        card.text(x + 80, y, f"{value:.2f}" if value < 1 else "1")
        for at, scale in zip((184, 328), scales[:, head], strict=True):
            words = f"{scale:.2f}" if scale != 1 else "unchanged"
            card.text(x + at, y, words, color=GRAY if scale == 1 else INK)
    for left, right in ((x - 32, x - 8), (x + 390, x + 414)):
        card.arrow(left, TOP + HEIGHT / 2, right, TOP + HEIGHT / 2)
