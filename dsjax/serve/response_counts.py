"""`ResponseCounts`: answers by route and status, for the metrics."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsjax.serve.metrics import Metrics

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class ResponseCounts:
    """ASGI middleware. Counts every answer under its route's path; what no route answered is counted together."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count its answer when it begins."""
        begun = False

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._count(scope, message["status"])
            await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._app(scope, receive, counted)
        except Exception:
            if not begun:
                self._count(scope, 500)  # Starlette answers so, further out
            raise

    def _count(self, scope: Scope, status: int) -> None:
        path = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in _METHODS else "other"  # a client can make any up
        self._metrics.on_response(path, method, status)
