"""Choose the format in which a model writes tool calls."""

from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.serve.dsml import DSML_FORMATS
from dsjax.serve.tool_calls import FORMATS, SEPARATOR, CallFormat

TOOL_FORMATS: dict[str, CallFormat] = FORMATS | DSML_FORMATS


def choose_tool_format(name: str, tokenizer: Tokenizer | None) -> CallFormat | None:
    """Return the format of this name; None for `none`, and for a model without tokenizer.

    `auto` takes the format that the model's template or prompt encoder writes, or else V3.1's where the model has its separator as a token.
    """
    if name == "none" or tokenizer is None:
        return None
    if name != "auto":
        return TOOL_FORMATS[name]
    template = tokenizer.chat_template
    if template is not None and template.writes(SEPARATOR):
        return FORMATS["deepseek_v3" if template.writes("```json") else "deepseek_v31"]
    for form in TOOL_FORMATS.values():
        if template is not None and template.writes(form.openings[0]):
            return form
    return FORMATS["deepseek_v31"] if tokenizer.token_id(SEPARATOR) is not None else None
