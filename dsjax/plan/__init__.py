"""From a cluster, a workload and an objective to a layout, every figure with its kind, source and range. No JAX."""
