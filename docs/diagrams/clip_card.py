"""Four heads, as QK-Clip sees them, scales them, and would see them again."""

import jax.numpy as jnp
import numpy as np
import optax
from card import ACCENT, Card, COLOURS, FAINT, GREY

import muonclip_jax as mc


LOGITS, THRESHOLD = (60.0, 180.0, 95.0, 400.0), 100.0
TOP, HEIGHT, BAR, PITCH = 92, 150, 26, 44
PANELS = {"before": 56, "gamma": 276, "after": 724}


def clip_card() -> Card:
    gamma, after = clipped()
    title = "QK-Clip, head by head"
    card = Card(912, TOP + HEIGHT + 36, title)
    card.text(24, 26, title, size=16, anchor="start", bold=True)
    _draw_logits(card, PANELS["before"], "largest logit S of this batch", LOGITS)
    _draw_gammas(card, PANELS["gamma"], gamma)
    _draw_logits(card, PANELS["after"], "the same batch afterwards", after)
    return card


def clipped() -> tuple[np.ndarray, np.ndarray]:
    """Gamma of each head, and the logit that its scaled weights give."""
    kernel = jnp.ones((8, len(LOGITS), 4))
    params = {"attn": {"query": {"kernel": kernel}, "key": {"kernel": kernel}}}
    stats = {"attn": {"max_logits": jnp.array(LOGITS)}}
    tx = optax.chain(optax.sgd(0.0), mc.qk_clip(THRESHOLD))
    updates, state = tx.update(params, tx.init(params), params, attention_stats=stats)
    weights = optax.apply_updates(params, updates)["attn"]
    sizes = [weights[name]["kernel"][0, :, 0] for name in ("query", "key")]
    gamma = mc.qk_clip_metrics(state, params)["layers"]["attn"]["gamma"]
    return np.asarray(gamma), np.asarray(LOGITS) * np.asarray(sizes[0] * sizes[1])


def _draw_logits(card: Card, x: float, title: str, logits) -> None:
    bottom, unit = TOP + HEIGHT, HEIGHT / max(LOGITS)
    card.text(x + 2 * PITCH - 9, TOP - 32, title, size=12.5, bold=True)
    for head, logit in enumerate(logits):
        left, height = x + head * PITCH, float(logit) * unit
        bar = dict(fill=COLOURS[head], stroke="none", radius=2)
        card.box(left, bottom - height, BAR, height, **bar)
        card.text(left + BAR / 2, bottom - height - 9, f"{logit:.0f}", size=11)
        card.text(left + BAR / 2, bottom + 14, f"head {head}", size=11, colour=GREY)
    card.line(x - 10, bottom, x + 4 * PITCH - 6, bottom, colour=FAINT)
    level = bottom - THRESHOLD * unit
    card.line(x - 10, level, x + 4 * PITCH - 6, level, colour=ACCENT, dashed=True)
    card.text(x - 13, level, f"{THRESHOLD:.0f}", size=11, colour=ACCENT, anchor="end")


def _draw_gammas(card: Card, x: float, gamma: np.ndarray) -> None:
    for words, at in (("gamma", 50), ("query", 154), ("key", 284)):
        card.text(x + at + 30, TOP - 32, words, size=12.5, bold=True)
    card.text(x + 80, TOP - 12, "threshold / S", size=11, colour=GREY)
    card.text(x + 184, TOP - 12, "times gamma^alpha", size=11, colour=GREY)
    card.text(x + 314, TOP - 12, "times gamma^(1-alpha)", size=11, colour=GREY)
    for head, value in enumerate(gamma):
        y = TOP + 20 + head * 34
        card.box(x + 6, y - 8, 16, 16, fill=COLOURS[head], stroke="none", radius=2)
        card.text(x + 80, y, f"{value:.2f}" if value < 1 else "1")
        share = value**0.5
        words = f"{share:.2f}" if value < 1 else "unchanged"
        for at in (184, 314):
            card.text(x + at, y, words, colour=GREY if value == 1 else "#1f2430")
    for left, right in ((x - 32, x - 8), (x + 390, x + 414)):
        card.arrow(left, TOP + HEIGHT / 2, right, TOP + HEIGHT / 2)
