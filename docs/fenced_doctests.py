"""Doctests of docstrings as code: Markdown reads the prompt `>>>` as a quotation."""

import re
from typing import Any

import griffe


# A prompt, and all lines up to an empty one.
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1.*\S.*)*", re.MULTILINE)


class FencedDoctests(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(_fence, obj.docstring.value)


def _fence(example: re.Match[str]) -> str:
    indent = example[1]
    return f"{indent}```pycon\n{example[0]}\n{indent}```"
