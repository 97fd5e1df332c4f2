"""``--page-source MODULE``: a page source that is not this program's own. docs/page-sources.md shows a whole one."""

import importlib
from types import ModuleType

from dsjax.errors import UserError


def import_page_source(name: str) -> ModuleType:
    """The module of a page source, whose `attachment()` the core gets, and whose `device_part(device, staging)` the executor.

    Raises:
        UserError: it cannot be imported, or lacks one of the two.
    """
    try:
        module = importlib.import_module(name)
    except Exception as error:  # whatever the module raises
        raise UserError(
            f"--page-source {name} cannot be imported ({type(error).__name__}: {error}); give the name of a module on PYTHONPATH"
        ) from error
    missing = [function for function in ("attachment", "device_part") if not callable(getattr(module, function, None))]
    if missing:
        raise UserError(
            f"--page-source {name} has no {' and no '.join(missing)}; it must define attachment() and device_part(device, staging) "
            "(docs/page-sources.md)"
        )
    return module
