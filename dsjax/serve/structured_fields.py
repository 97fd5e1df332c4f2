"""The fields that ask for a form of the text, OpenAI's and vLLM's, as one `StructuredOutputs`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from dsjax.engine.structured_params import StructuredOutputs
from dsjax.serve.bounds import MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_NAME_CHARACTERS
from dsjax.serve.errors import ApiError
from dsjax.serve.strict_model import StrictModel

GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_BYTES)]
Choices = Annotated[list[Annotated[str, Field(max_length=MAX_GRAMMAR_BYTES)]], Field(max_length=MAX_CHOICES)]
Schema = dict[str, Any] | GrammarText


class JsonSchema(StrictModel):
    """OpenAI's `json_schema`; the schema always binds, `strict` or not."""

    name: str = Field("", max_length=MAX_NAME_CHARACTERS)
    description: str | None = Field(None, max_length=MAX_GRAMMAR_BYTES)
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredFields(StrictModel):
    """vLLM's `structured_outputs`: exactly one of them."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    disable_any_whitespace: bool | None = Field(
        None, description="JSON without blanks; default: as the server was started"
    )


class GuidedFields(StrictModel):
    """Every way to ask for a form. At most one may be used."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: Schema | None = Field(None, description="older name of structured_outputs.json")
    guided_regex: GrammarText | None = Field(None, description="older name of structured_outputs.regex")
    guided_choice: Choices | None = Field(None, description="older name of structured_outputs.choice")
    guided_grammar: GrammarText | None = Field(None, description="older name of structured_outputs.grammar")

    def form_of_text(self) -> dict[str, Any] | None:
        """The one form asked for, as a keyword argument of `StructuredOutputs`; None for any text.

        Raises:
            ApiError: several are asked for, or one without its content.
        """
        found: list[tuple[str, dict[str, Any]]] = []
        for name in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{name}")) is not None:
                found.append((f"guided_{name}", {name: value}))
        if self.structured_outputs is not None:
            given = self.structured_outputs
            forms = {"json": given.json_, "json_object": given.json_object or None, "regex": given.regex}
            forms |= {"choice": given.choice, "grammar": given.grammar}
            chosen = {name: value for name, value in forms.items() if value is not None}
            StructuredOutputs(**chosen)  # says what is wrong with none or several
            if given.disable_any_whitespace is not None:
                chosen["disable_any_whitespace"] = given.disable_any_whitespace
            found.append(("structured_outputs", chosen))
        if self.response_format is not None and self.response_format.type != "text":
            found.append(("response_format", self._response_form(self.response_format)))
        if len(found) > 1:
            raise ApiError(400, f"{found[0][0]} and {found[1][0]} both ask for a form; give one", param=found[1][0])
        return found[0][1] if found else None

    @staticmethod
    def _response_form(given: ResponseFormat) -> dict[str, Any]:
        if given.type == "json_object":
            return {"json_object": True}
        if given.json_schema is None:
            raise ApiError(400, "response_format of type json_schema wants a json_schema", param="response_format")
        return {"json": given.json_schema.schema_}
