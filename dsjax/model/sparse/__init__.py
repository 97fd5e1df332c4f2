"""DeepSeek-V3.2's sparse attention: an indexer scores the context, and a query attends to the tokens with the highest scores.

See ``docs/sparse-attention.md``. ``Indexer`` is a layer's weights, ``choose`` the choice among scores; ``sparse.attend.SparseMLA`` is
attention over a paged cache.
"""

from dsjax.model.sparse.choose import choose, index_scores, unpack
from dsjax.model.sparse.indexer import Indexer, IndexProjections
from dsjax.model.sparse.precision import IndexScores

__all__ = ["IndexProjections", "IndexScores", "Indexer", "choose", "index_scores", "unpack"]
