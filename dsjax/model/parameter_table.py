"""Structure of a model and the table of its parameters, without allocating them."""

from __future__ import annotations

import dataclasses

import numpy as np

from dsjax.config import ModelConfig
from dsjax.errors import ConfigError
from dsjax.model.parameters import Declaration, ParameterInfo, ParameterTable, Weights
from dsjax.model.router import ExpertRouter
from dsjax.model.transformer import Transformer


def parameter_table(
    config: ModelConfig,
    *,
    weights: Weights = "bf16",
    platform: str = "cpu",
    num_physical: int | None = None,
    materialise: bool = False,
    mtp: bool = True,
    shared_apart: bool = True,
    derived_dtype: np.dtype | None = None,
    begins: bool = True,
    ends: bool = True,
) -> ParameterTable:
    """Return the model's structure and its parameters, without allocating them.

    weights: weight format of matrices. platform: see ``parameters.storage_dtype``. num_physical: physical experts of a layer,
    default the logical ones. materialise: include the products of a materialised MLA form, which are derived
    from other parameters and are in no checkpoint (``init == "derived"``). mtp: include the model's MTP modules, if any. shared_apart:
    False if the shared expert is one of the physical experts and has no separate parameters. derived_dtype: see ``Declaration``.
    begins, ends: see ``Transformer``.

    Raises:
        ConfigError: ``config.router`` is not a router class.
    """
    if not shared_apart:
        config = dataclasses.replace(config, n_shared_experts=0)
    router = config.router or ExpertRouter
    if not (isinstance(router, type) and issubclass(router, ExpertRouter)):
        raise ConfigError(f"router is {router!r}, expected a class that inherits dsjax.model.router.ExpertRouter")
    num_physical = config.n_routed_experts if num_physical is None else num_physical
    declare = Declaration(
        weights, platform, num_physical=num_physical, materialise=materialise, derived_dtype=derived_dtype
    )
    model = Transformer(declare, config, mtp=mtp, begins=begins, ends=ends)
    return ParameterTable.of(model)


def abstract_parameters(config: ModelConfig, **options) -> dict[str, ParameterInfo]:
    """Return ``{path: ParameterInfo}`` of a model. options: see ``parameter_table``."""
    return dict(parameter_table(config, **options).infos)
