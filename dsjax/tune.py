"""`python -m dsjax.tune` is `dsjax tune`; the code is in `dsjax/cli`."""

from dsjax.cli import main

if __name__ == "__main__":
    main(["tune"])
