"""`Tokenizer`: a model directory's `tokenizer.json` (or Kimi's `tiktoken.model`) and `tokenizer_config.json`, as Hugging Face reads them.

`IncrementalDetokenizer` turns a stream of its tokens into text. `ChatTemplate` renders conversations, in Jinja's immutable sandbox.
"""

import codecs
import contextlib
import datetime
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import tokenizers

from dsjax.engine.text.prompt_encoder import (
    BEYOND_EFFORT,
    ENCODERS,
    FIRST_EFFORTS,
    ChatTemplateError,
    PromptEncoder,
    V4Encoder,
)
from dsjax.engine.text.tiktoken_model import FILE_NAME, byte_letters, read_tiktoken
from dsjax.errors import UserError, why_unreadable

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class TokenizerError(UserError):
    """Tokenizer files are missing, unreadable, or of an unsupported kind."""


class TextError(UserError):
    """A string is not valid text."""


class Tokenizer:
    """A byte-level BPE tokenizer with its special tokens and chat template.

    Attributes:
        bos_id, eos_id: ids of the begin- and end-of-sequence tokens; None if the tokenizer has none.
        vocab_size: the largest token id + 1. A model's vocabulary may be padded beyond it.
        chat_template: the directory's template, else the prompt encoder of its model, else None.
        whole_texts: text by token id, for tokens that are whole characters (`WholeTexts`).
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any] | None = None):
        self._backend = backend
        self._config = config = dict(config or {})
        _check_byte_level(backend)
        self._bytes: dict[int, bytes] = {}
        self.whole_texts = WholeTexts(self)
        self._special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        texts = {name: config.get(name) for name in _SPECIAL_NAMES}  # a string, or an AddedToken as a mapping
        texts = {name: text.get("content") if isinstance(text, Mapping) else text for name, text in texts.items()}
        self.special_tokens = {name: text for name, text in texts.items() if text}
        self.bos_id = self._special_id("bos_token")
        self.eos_id = self._special_id("eos_token")
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.chat_template: Template | None = self._encoder() or ChatTemplate.from_config(
            config.get("chat_template"), self.special_tokens
        )
        self._prepends_bos = self._bos_is_ours(config)

    @classmethod
    def from_directory(
        cls,
        directory: str | Path,
        mode: str = "auto",
        chat_template: str | Path | None = None,
        model_directory: str | Path | None = None,
    ) -> "Tokenizer":
        """Read `tokenizer.json` or `tiktoken.model`, and `tokenizer_config.json` and `chat_template.jinja` if present.

        Args:
            mode: renderer of conversations, one of `TOKENIZER_MODES`. `hf`: the chat template; `auto`: the chat template, else the encoder
                of the `model_type` in `config.json`; other names: the encoder of that name.
            chat_template: template file to use instead of the directory's.
            model_directory: directory of the model's `config.json`; default: `directory`.

        Raises:
            TokenizerError: a file is missing or unreadable.
        """
        directory, model_directory = Path(directory), Path(model_directory or directory)
        config = read_json(directory / "tokenizer_config.json")
        backend = _read_backend(directory, config)
        template_path = Path(chat_template or directory / "chat_template.jinja")
        if chat_template is not None or template_path.is_file():
            try:
                config["chat_template"] = template_path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerError(f"{template_path} cannot be read: {why_unreadable(error)}") from error
        if mode == "auto" and config.get("chat_template") is None:
            mode = read_json(model_directory / "config.json").get("model_type")
        if mode in ENCODERS:
            config["prompt_encoder"] = mode
            code = model_directory / "encoding" / "encoding_dsv4.py"  # read, never run
            if code.is_file() and BEYOND_EFFORT.partition("\n")[0] not in code.read_text(
                encoding="utf-8", errors="replace"
            ):
                config["effort_prompts"] = FIRST_EFFORTS
        return cls(backend, config)

    def _encoder(self) -> PromptEncoder | None:
        """Make the prompt encoder that `from_directory` chose."""
        name = self._config.get("prompt_encoder")
        if name == "deepseek_v4" and "effort_prompts" in self._config:
            return V4Encoder(self._config["effort_prompts"])
        return ENCODERS[name]() if name in ENCODERS else None

    def to_texts(self) -> tuple[str, dict[str, Any]]:
        """Return the arguments of `from_texts`: `tokenizer.json`'s text, and the configuration with its template."""
        return self._backend.to_str(), self._config

    @classmethod
    def from_texts(cls, backend: str, config: Mapping[str, Any]) -> "Tokenizer":
        """Create the same tokenizer in another process from the values of `to_texts`."""
        return cls(tokenizers.Tokenizer.from_str(backend), config)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with the begin-of-sequence token if so configured.

        Raises:
            TextError: the text has an unpaired surrogate.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TextError(
                f"the text has half a surrogate pair at character {error.start}; send whole characters"
            ) from error
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return [self.bos_id, *ids] if add_special_tokens and self._prepends_bos else ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of a whole token sequence. Ids beyond the vocabulary are skipped."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves the token out when it skips special tokens."""
        return token_id in self._special_ids

    def token_id(self, text: str) -> int | None:
        """Return the id of a token by its text in tokenizer.json, e.g. `</think>`; None if there is no such token."""
        return self._backend.token_to_id(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes; empty for an id beyond the vocabulary."""
        known_bytes = self._bytes.get(token_id)
        if known_bytes is None:
            known_bytes = self._bytes[token_id] = _bytes_of(self._backend.id_to_token(token_id))
        return known_bytes

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        if text is None:
            return None
        token_id = self._backend.token_to_id(text)
        if token_id is None:
            raise TokenizerError(
                f"tokenizer_config.json names {text!r} as {name}, but tokenizer.json has no such token"
            )
        return token_id

    def _bos_is_ours(self, config: Mapping[str, Any]) -> bool:
        """Whether `encode` must add the begin-of-sequence token, because tokenizer.json's own post-processor does not.

        transformers' Llama tokenizer classes, which DeepSeek's configurations name, add it unless told otherwise.
        """
        default = str(config.get("tokenizer_class", "")).startswith("LlamaTokenizer")
        if self.bos_id is None or not config.get("add_bos_token", default):
            return False
        return self.bos_id not in self._backend.encode("", add_special_tokens=True).ids


class IncrementalDetokenizer:
    """Turns a stream of tokens into pieces of text whose concatenation is `tokenizer.decode` of all of them.

    A token may end inside a character. Its bytes are held back until the character is complete, or becomes U+FFFD because it is invalid.

    kept: special tokens to keep when special tokens are skipped.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, kept: Collection[int] = ()):
        self._tokenizer = tokenizer
        self._whole_texts = tokenizer.whole_texts
        self._skip_special_tokens, self._kept = skip_special_tokens, kept
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._within_character = False

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is now complete."""
        if not self._within_character:
            text = self._whole_texts[token_id]
            if text is not None:
                return text
        if self._skip_special_tokens and token_id not in self._kept and self._tokenizer.is_special(token_id):
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self._within_character = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """At the end of the stream, return the text of the bytes held back: U+FFFD or nothing."""
        return self._decoder.decode(b"", final=True)


def has_tokenizer(directory: Path) -> bool:
    """Whether the directory has a `tokenizer.json` or a `tiktoken.model`."""
    return (directory / "tokenizer.json").is_file() or (directory / FILE_NAME).is_file()


def _read_backend(directory: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Read `tokenizer.json`, else `tiktoken.model`."""
    path, ranks = directory / "tokenizer.json", directory / FILE_NAME
    if not has_tokenizer(directory):
        raise TokenizerError(
            f"found no tokenizer.json or {FILE_NAME} in {directory}; put the model's tokenizer beside its weights"
        )
    if not path.is_file():
        try:
            return read_tiktoken(ranks, config)
        except ValueError as error:
            raise TokenizerError(f"{ranks} is not a list of tokens in base64 and their ranks: {error}") from error
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{path} is not a tokenizer that the tokenizers library reads: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty one if the file is missing."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error


class WholeTexts(dict[int, "str | None"]):
    """Token id to text, for tokens that are whole characters and not special; None for others. Filled on first access."""

    def __init__(self, tokenizer: "Tokenizer"):
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        """Decode a token and remember its text."""
        text = None
        if not self._tokenizer.is_special(token_id):
            with contextlib.suppress(UnicodeDecodeError):
                text = self._tokenizer.token_bytes(token_id).decode("utf-8")
        self[token_id] = text
        return text


def _check_byte_level(backend: tokenizers.Tokenizer) -> None:
    decoder = (json.loads(backend.to_str()).get("decoder")) or {}
    kinds = [part["type"] for part in decoder.get("decoders", [decoder] if decoder else [])]
    if kinds != ["ByteLevel"]:
        raise TokenizerError(
            f"tokenizer.json has the decoder {kinds or 'none'}, expected ByteLevel: the DeepSeek family's tokenizers are "
            "byte-level BPE, and text is streamed byte by byte here; convert the tokenizer to byte-level BPE"
        )


_BYTE_OF = {letter: byte for byte, letter in enumerate(byte_letters())}


def _bytes_of(token: str | None) -> bytes:
    """Return the bytes of a vocabulary entry. An entry with a character outside the byte alphabet is an added token, in plain text."""
    if token is None:
        return b""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


class ChatTemplate:
    """A chat template as Hugging Face renders it: same environment, same globals, same variables.

    Templates come from the model's directory, never from a request. `source` is the template's text.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is not a Jinja template: {error}") from error

    @classmethod
    def from_config(cls, entry: Any, special_tokens: Mapping[str, str]) -> "ChatTemplate | None":
        """Read `chat_template` of tokenizer_config.json: a template, or a list of named ones with one called `default`."""
        if entry is None:
            return None
        if isinstance(entry, str):
            return cls(entry, special_tokens)
        named = {item["name"]: item["template"] for item in entry}
        if "default" not in named:
            raise ChatTemplateError(
                f"tokenizer_config.json has the chat templates {sorted(named)}, expected one named default"
            )
        return cls(named["default"], special_tokens)

    def reads(self, variable: str) -> bool:
        """Whether the template reads a variable or a field of this name."""
        return re.search(rf"\b{re.escape(variable)}\b", self.source) is not None

    def writes(self, text: str) -> bool:
        """Whether the template has this text, e.g. ``</think>``."""
        return text in self.source

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Return the prompt's text with special tokens; encode it with `add_special_tokens=False`.

        Raises:
            ChatTemplateError: the template does not accept the messages.
        """
        known = {"tools": None, "documents": None, **self._special_tokens, **variables}
        known |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(known)
        except Exception as error:  # anything that a sandboxed template raises is about its messages
            raise ChatTemplateError(f"the model's chat template does not accept these messages: {error}") from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Return JSON without escaped HTML characters, unlike Jinja's own `tojson`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


Template = ChatTemplate | PromptEncoder
"""Renders a conversation as a prompt."""
