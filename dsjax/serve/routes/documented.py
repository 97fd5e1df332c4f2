"""What the schema says of errors: every status that an endpoint can answer with."""

from typing import Any

from dsjax.serve.responses import ErrorBody

_MEANINGS = {
    400: "not JSON, or a value that cannot be",
    401: "no valid key",
    403: "admin endpoints are closed",
    404: "no such model, or no such path",
    405: "not this method",
    408: "the request did not arrive in time",
    413: "the body is too large",
    422: "fields that are not those of the schema",
    429: "too much waits",
    500: "the engine failed",
    503: "warming up, or shutting down",
}
_ALWAYS = (400, 401, 404, 405, 408, 413)


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`: these, and those of every request (a bad header, a missing key, a body that does not come)."""
    return {status: {"model": ErrorBody, "description": _MEANINGS[status]} for status in sorted({*_ALWAYS, *statuses})}
