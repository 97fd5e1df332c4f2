"""`python -m dsjax.doctor` is `dsjax doctor`; the code is in `dsjax/cli`."""

from dsjax.cli import main

if __name__ == "__main__":
    main(["doctor"])
