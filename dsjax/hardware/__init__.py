"""What a device is: an accelerator as its file describes it, and the machine that the program runs on. No JAX."""

from dsjax.hardware.description import Hardware, bundled_hardware, load_hardware

__all__ = ["Hardware", "bundled_hardware", "load_hardware"]
