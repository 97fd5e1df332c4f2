"""``ExpertReader``: reads single routed experts of a checkpoint on demand, in the devices' storage format."""

import numpy as np

from dsjax.checkpoint.assemble import Assembler
from dsjax.checkpoint.errors import CheckpointError
from dsjax.checkpoint.names import TensorNames
from dsjax.checkpoint.source import Checkpoint
from dsjax.config import ModelConfig
from dsjax.model.parameter_table import abstract_parameters
from dsjax.model.parameters import Weights


class ExpertReader:
    """Reads experts one at a time. ``load`` must have checked the checkpoint.

    Args:
        weights, platform, mtp: as for ``load``, and as on the devices.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, weights: Weights, platform: str, *, mtp: bool):
        self._names = TensorNames(config, abstract_parameters(config, weights=weights, platform=platform, mtp=mtp))
        self._checkpoint = checkpoint.in_format_of(self._names)

    def read(self, path: str, layer: int, expert: int) -> np.ndarray:
        """Return logical expert ``expert`` of one layer of the stacked parameter at ``path``, without the layer and expert axes.

        Raises:
            CheckpointError: the expert has invalid values.
        """
        info = self._names.parameters[path]
        assembler = Assembler(self._names, self._checkpoint.tensors)
        out = np.empty((1, 1, *info.shape[2:]), info.storage_dtype)
        rest = [slice(0, size) for size in info.shape[2:]]
        assembler.fill(out, path, (slice(layer, layer + 1), slice(expert, expert + 1), *rest))
        self._checkpoint.release()
        if assembler.problems:
            raise CheckpointError(self._checkpoint.directory, assembler.problems)
        return out[0, 0]
