"""From arguments to an executor: options, layout, weights, sizes."""
