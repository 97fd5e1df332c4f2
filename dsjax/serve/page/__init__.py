"""The page at `/`: try the model, watch the ranks. Plain files, no build step, nothing from elsewhere."""
