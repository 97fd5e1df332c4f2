"""Meshes, partition rules, expert dispatch and placement; knows nothing of any model, request or HTTP."""

from sharding.errors import MeshError
from sharding.mesh import MeshSpec
from sharding.rules import Rules

__all__ = ["MeshError", "MeshSpec", "Rules"]
