"""Paths, headers and parts of bodies that requests of several files have."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
HELD = 1000.0
"""Seconds of a step that a test holds until it sets others."""
LONG = {"prompt": "ab", "max_tokens": 110, "temperature": 0}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


ADMIN = bearer("root")


def tool(name: str = "f", **function) -> dict:
    return {"type": "function", "function": {"name": name, **function}}


def call(name: str, arguments: str, id: str = "call_1") -> dict:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def taking(required: tuple[str, ...] = (), **kinds: str) -> dict:
    """The schema of an object whose properties have these types."""
    properties = {name: {"type": kind} for name, kind in kinds.items()}
    return {"type": "object", "properties": properties} | ({"required": list(required)} if required else {})
