"""`python -m dsjax.replay` is `dsjax replay`; the code is in `dsjax/cli`."""

from dsjax.cli import main

if __name__ == "__main__":
    main(["replay"])
