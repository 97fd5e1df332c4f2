"""Fixed limits on request fields. Configurable limits are options of `dsjax serve`."""

MAX_COMPLETIONS = 128
"""Largest `n`, as in OpenAI's API."""

MAX_PROMPTS = 1024
"""Most prompts in one request."""

MAX_SEQUENCES = 4096
"""Most completions of one request: number of prompts times `n`."""

MAX_MESSAGES = 4096
MAX_PARTS = 1024
"""Most content parts in one message."""

MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
"""Most tool calls in one assistant message."""

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 1024
MAX_BAD_WORD_CHARACTERS = 256
MAX_BIASES = 4096
MAX_CHOICES = 1024
"""Most strings in a structured output's `choice`."""

MAX_GRAMMAR_BYTES = 64 * 1024
"""Largest JSON schema, regex or grammar, and largest total size of a request's tools as JSON."""

MAX_METADATA = 16
"""Most entries in `metadata`, as in OpenAI's API."""

MAX_NAME_CHARACTERS = 256
"""Longest model name, user, cache salt or session."""

MAX_REQUEST_ID_CHARACTERS = 128
MAX_INTEGER = 2**31 - 1
"""Largest integer field, because counts are int32 on devices."""
