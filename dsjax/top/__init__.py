"""`dsjax top`: a running server in the terminal: its ranks, its cache, tokens a second, latencies, experts."""
