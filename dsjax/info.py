"""`python -m dsjax.info` is `dsjax info`; the code is in `dsjax/cli`."""

from dsjax.cli import main

if __name__ == "__main__":
    main(["info"])
