"""`Profiler`: JAX traces of the running server, where its administrator said."""

from dsjax.serve.errors import ApiError


class Profiler:
    """At most one trace at a time, into a directory that no request can name. Called in the engine's thread."""

    def __init__(self, directory: str | None):
        self._directory = directory
        self._running = False

    def start(self) -> str:
        """Begin a trace.

        Raises:
            ApiError: no directory was configured, or a trace is running.
        """
        if self._directory is None:
            raise ApiError(
                400, "this server does not profile; it was started without --profile-dir", code="no_profile_dir"
            )
        if self._running:
            raise ApiError(400, "a profile is running; stop it first", code="profile_running")
        import jax

        jax.profiler.start_trace(self._directory)
        self._running = True
        return "profiling"

    def stop(self) -> str:
        """End the trace and write it.

        Raises:
            ApiError: none is running.
        """
        if not self._running:
            raise ApiError(400, "no profile is running; start one first", code="no_profile")
        import jax

        self._running = False
        jax.profiler.stop_trace()
        return "written"
