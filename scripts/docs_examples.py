"""For the site: the examples of a docstring as code, which Markdown would take for quotations."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Fences around each example that begins with >>>."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object that has just been read."""
        if obj.docstring:
            fenced = re.sub(r"(?m)^( *)>>> (?:.+\n?)+", r"\1```pycon\n\g<0>\n\1```\n", obj.docstring.value)
            obj.docstring.value = fenced
