"""Render the Jinja templates of `configs`."""

import functools
from typing import Any

import jinja2
import markupsafe

from dsjax.toml_files import bundled_text


@functools.cache
def _template(*path: str) -> jinja2.Template:
    how = {"trim_blocks": True, "lstrip_blocks": True, "autoescape": path[-1].endswith((".xml", ".html"))}
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, **how)
    environment.filters["f"] = format
    environment.filters["cell"] = lambda text: text.replace("|", "\\|").replace("\n", " ")
    environment.filters["attribute"] = lambda text: markupsafe.escape(text).replace("\n", markupsafe.Markup("&#10;"))
    return environment.from_string(bundled_text(*path))


def filled(*path: str, **values: Any) -> str:
    """Render a template of `configs`, without its final newline.

    Filters: `f`: format (`x | f(",.0f")`); `cell`, `attribute`: escape for Markdown tables, XML attributes. XML and HTML escape all values.
    """
    return _template(*path).render(values).removesuffix("\n")
