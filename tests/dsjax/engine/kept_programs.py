"""Programs that several engines of one process share, for tests that make the same engine again: it is neither traced nor compiled anew."""

import contextlib
from collections.abc import Iterator

import pytest

from dsjax.engine.program_cache import library as program_library
from dsjax.engine.program_cache.library import ProgramLibrary


@contextlib.contextmanager
def kept_in(library: ProgramLibrary) -> Iterator[None]:
    """Engines that are made meanwhile take their programs from this library and keep them there; their options must be equal but for what
    no program depends on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_library, "ProgramLibrary", lambda: library)
        yield
