"""Flax NNX modules of the DeepSeek-V2/V3 family, and the one step that serving, dry run and planner share."""
