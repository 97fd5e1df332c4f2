"""A process that publishes transfer chunks, for the one that started it: a chunk's number a line, and its ticket for each."""

import json
import sys

import jax
import ml_dtypes
import numpy as np

from dsjax.engine.transfer.transport import open_transport

SHAPES = {
    "latent": ((1, 16, 3, 4, 100), np.dtype(np.float32)),
    "rope": ((1, 16, 3, 4, 10), np.dtype(ml_dtypes.bfloat16)),
    "filled": ((1, 16, 3), np.dtype(bool)),
    "codes": ((1, 16, 3, 4, 7), np.dtype(ml_dtypes.float8_e4m3fn)),
}


def values(number):
    """Each value tells its place in a chunk, and the chunk."""
    return {
        name: ((np.arange(np.prod(shape)).reshape(shape) + number) % 13).astype(dtype)
        for name, (shape, dtype) in SHAPES.items()
    }


def chunk(number, device=None):
    return jax.device_put(values(number), device or jax.local_devices()[0])


def main() -> None:
    transport = open_transport(sys.argv[1], jax.local_devices()[0], "127.0.0.1")
    print(json.dumps({"address": transport.address}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"ticket": transport.publish(int(line), chunk(int(line))).hex()}), flush=True)


if __name__ == "__main__":
    main()
