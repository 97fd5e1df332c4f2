"""Errors of the mesh and its layouts."""


class MeshError(ValueError):
    """A mesh, layout or placement that cannot be: says what was found, what was expected, and what would fit."""
