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

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if scope["method"] in _METHODS else "other"  # a client can make any up
                self._metrics.on_response(path, method, message["status"])
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)
