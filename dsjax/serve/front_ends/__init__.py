"""Several HTTP processes in front of one engine: `--api-server-count`. `docs/serving.md` has the design."""
