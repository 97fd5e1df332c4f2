"""`python -m dsjax.serve` is `dsjax serve`."""

from dsjax.cli import main

if __name__ == "__main__":
    main(["serve"])
