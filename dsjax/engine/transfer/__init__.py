"""Pages of the latent cache from one engine to another: remote prefill."""
