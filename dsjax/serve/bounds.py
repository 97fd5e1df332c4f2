"""Limits of a request's fields, besides those that are options of `serve`."""

MAX_COMPLETIONS = 128
"""Largest `n`, as at OpenAI."""

MAX_PROMPTS = 1024
"""Prompts of one request."""

MAX_SEQUENCES = 4096
"""Completions of one request: prompts times `n`."""

MAX_MESSAGES = 4096
MAX_PARTS = 1024
"""Parts of one message's content."""

MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
"""Calls of one assistant message."""

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 256
MAX_BIASES = 4096
MAX_CHOICES = 1024
"""Strings of a structured output's `choice`."""

MAX_GRAMMAR_BYTES = 64 * 1024
"""Limit of a JSON schema, regex or grammar, and of all schemas of a request's tools together."""

MAX_METADATA = 16
"""Entries of `metadata`, as at OpenAI."""

MAX_NAME_CHARACTERS = 256
"""Model names, users, salts, sessions."""

MAX_REQUEST_ID_CHARACTERS = 128
MAX_INTEGER = 2**31 - 1
"""Largest integer: counts are int32 on devices."""
