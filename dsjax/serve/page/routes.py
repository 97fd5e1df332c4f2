"""Routes of the web page (`GET /` and the files that it loads) and of `GET /docs`."""

import functools
import importlib.resources
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from dsjax.serve.page.reference import render_reference

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/answer.js": ("answer.js", "text/javascript; charset=utf-8"),
    "/page/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/page/exposition.js": ("exposition.js", "text/javascript; charset=utf-8"),
    "/page/watch.js": ("watch.js", "text/javascript; charset=utf-8"),
}

PAGE_PATHS = frozenset({*_FILES, "/docs"})
"""Paths whose 401 response asks for Basic authentication, so that a browser prompts its user for the API key as a password."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def create_page_routes(app: FastAPI) -> None:
    """Add the routes of the page and of `/docs`. The page's scripts call the HTTP API."""
    for path, (name, content_type) in _FILES.items():
        content = (importlib.resources.files(__package__) / name).read_bytes()
        app.add_api_route(path, _serve_file(content, content_type), methods=["GET", "HEAD"], include_in_schema=False)
    render_docs = functools.cache(lambda: render_reference(app.openapi()).encode())  # on first use, with all routes

    async def docs() -> Response:
        return Response(render_docs(), headers={"Content-Type": "text/html; charset=utf-8", **_HEADERS})

    app.add_api_route("/docs", docs, methods=["GET", "HEAD"], include_in_schema=False)


def _serve_file(content: bytes, content_type: str) -> Any:
    async def serve() -> Response:
        return Response(content, headers={"Content-Type": content_type, **_HEADERS})

    return serve
