"""Arrivals played through on virtual time: percentiles and goodput beside the planner's mean values."""
