"""Compiled programs: kept for the other meshes that an engine may have, and on disk for the next start."""
