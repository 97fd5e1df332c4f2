"""`python -m dsjax.generate` is `dsjax generate`; the code is in `dsjax/cli`."""

from dsjax.cli import main

if __name__ == "__main__":
    main(["generate"])
