"""`installed_version`: which version of a package there is, for messages and files."""

import importlib.metadata


def installed_version(package: str, missing: str = "not installed") -> str:
    """The version of a package; `missing` where there is none, as for dsjax itself when it runs from its source tree."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return missing
