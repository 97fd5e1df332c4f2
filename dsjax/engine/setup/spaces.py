"""Compatibility fingerprints, as plain values: two processes share pages, or use each other's routed experts, only if these are equal."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from dsjax.checkpoint.fingerprint import fingerprint
from dsjax.engine.afd.options import afd_addresses
from dsjax.engine.setup.args import EngineArgs
from dsjax.model.step import ModelStep


def page_space(args: EngineArgs, step: ModelStep, directory: Path) -> dict[str, Any]:
    """Return everything that a page's values depend on, except its tokens and shapes. directory: the checkpoint's folder."""
    arithmetic = {}
    if args.batch_invariant:  # last bits matter: find no pages of engines with other arithmetic
        arithmetic = {"batch_invariant": step.implementations, "form": step.decode_form.name}
    return _common_space(args, step, directory) | {
        "kv_dtype": str(jnp.dtype(step.cache_dtype)),
        **step.attention.form_of_pages,
        "page_size": step.page_size,
        "module_layer": step.has_mtp,
        **arithmetic,
    }


def expert_space(args: EngineArgs, step: ModelStep, directory: Path) -> dict[str, Any]:
    """Return everything that the results of another process's routed experts depend on, except the rows. directory: as above."""
    return _common_space(args, step, directory) | {
        "expert_mesh": args.expert_mesh,
        "physical experts": step.placement.n_physical,
        "processes with experts": len(afd_addresses(args)),
        "sums by choice": step.dispatch.by_choice or step.products.native,
        "MTP module": step.has_mtp,
        "encrypt_bulk": args.encrypt_bulk,
    }


def _common_space(args: EngineArgs, step: ModelStep, directory: Path) -> dict[str, Any]:
    return {
        "fingerprint": fingerprint(directory),
        "dtype": str(step.dtype),
        "weights": args.weights,
        "activation_scheme": str(step.scheme),
        "dispatch_wire": args.dispatch_wire,
    }
