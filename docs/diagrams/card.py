"""What all diagrams share: a card with text, boxes and arrows."""

from typing import Any

import drawsvg


INK, GRAY, FAINT = "#1f2430", "#667085", "#d5d9e2"
ACCENT, PALE = "#3f51b5", "#eef0fa"
COLORS = ("#3b75af", "#ef8636", "#519e3e", "#8d69b8")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SIZE = 14  # of text; a page shows cards of 960 pixels as 772, so that 11 are left


class Card:
    """A drawing on a light background of its own, so that dark pages can show it."""

    def __init__(self, width: float, height: float, title: str):
        self.width, self.height = width, height
        self._drawing = drawsvg.Drawing(
            width, height, font_family=FONT, role="img", aria_label=title
        )
        tip: dict[str, Any] = dict(fill=GRAY, stroke="none")
        self._tip = drawsvg.Marker(-7, -4, 0, 4, scale=1, orient="auto")
        self._tip.append(drawsvg.Lines(-7, -4, 0, 0, -7, 4, close=True, **tip))
        self.box(0.5, 0.5, width - 1, height - 1, fill="#ffffff", radius=12)
        self.text(24, 26, title, size=16, anchor="start", bold=True)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        stroke: str = FAINT,
        radius: float = 6,
        dashed: bool = False,
    ) -> None:
        style: dict[str, Any] = dict(fill=fill, stroke=stroke, rx=radius)
        if dashed:
            style["stroke_dasharray"] = "4 3"
        place = _rounded(x, y, width, height)
        self._drawing.append(drawsvg.Rectangle(*place, **style))

    def mark(self, x: float, y: float, width: float, height: float, color: str) -> None:
        """A matrix, a part of one, or a bar; white lines part neighbors."""
        self.box(x, y, width, height, fill=color, stroke="#ffffff", radius=1)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = SIZE,
        color: str = INK,
        anchor: str = "middle",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        style: dict[str, Any] = dict(fill=color, text_anchor=anchor)
        style["dominant_baseline"] = "middle"
        if bold:
            style["font_weight"] = "600"
        if mono:
            style["font_family"] = MONO
        self._drawing.append(drawsvg.Text(words, size, *_rounded(x, y), **style))

    def line(self, *points: float, color: str = GRAY, dashed: bool = False) -> None:
        self._lines(points, color, {"stroke_dasharray": "4 3"} if dashed else {})

    def arrow(self, *points: float, color: str = GRAY) -> None:
        self._lines(points, color, {"marker_end": self._tip})

    def svg(self) -> str:
        return f"{self._drawing.as_svg()}\n"

    def _lines(
        self, points: tuple[float, ...], color: str, style: dict[str, Any]
    ) -> None:
        style |= dict(fill="none", stroke=color, stroke_width=1.5)
        self._drawing.append(drawsvg.Lines(*_rounded(*points), **style))


def _rounded(*numbers: float) -> list[float]:
    """Short, and the same on every machine."""
    return [round(float(x), 1) for x in numbers]
