"""Formulas as MathML, which browsers show without a script or a font from elsewhere."""

import html
import re
from typing import Any

from latex2mathml.converter import convert


FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL
)


def on_page_content(content: str, **_: Any) -> str:
    return FORMULA.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    element, bracket, formula = match.groups()
    display = "block" if bracket == "[" else "inline"
    math = convert(html.unescape(formula), display=display)
    return f'<{element} class="formula">{math}</{element}>'
