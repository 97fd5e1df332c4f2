"""`python -m dsjax.plan` is `dsjax plan`."""

from dsjax.cli import main

if __name__ == "__main__":
    main(["plan"])
