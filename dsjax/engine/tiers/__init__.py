"""Offload tiers: host memory and the disk, and the events of pages."""
