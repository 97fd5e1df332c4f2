"""`python -m dsjax.kernels` is `dsjax kernels`."""

from dsjax.cli import main

if __name__ == "__main__":
    main(["kernels"])
