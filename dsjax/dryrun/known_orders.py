"""Known reductions whose summation order depends on the layout or the batch, each with its reason and a remedy.

`dsjax dryrun --reductions` fails for a reduction that may depend on them and matches no entry. Entries match places as narrowly as
possible, so that an old reason does not cover a new reduction. docs/measurements/exactness-open-sums.csv shows the list for DeepSeek-V3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dsjax.dryrun.program.reductions import Reduction


@dataclass(frozen=True)
class KnownOrder:
    """A reason that explains some reductions."""

    name: str
    carriers: tuple[str, ...]  # as in ``Reduction``
    what: str  # regular expression that must match all of ``Reduction.what``
    places: str  # the same for the place in the model, without the MTP module's prefix
    why: str  # why the order depends on layout or batch, in sentences
    remedy: str  # how to end the dependence, as the rest of the sentence "To end it: …"

    def explains(self, place: str, reduction: Reduction) -> bool:
        """Return whether this entry explains a reduction at a place."""
        place = re.sub(r"^(draft/)?(mtp/)?", "", place)
        return (
            reduction.carrier in self.carriers
            and re.fullmatch(self.what, reduction.what) is not None
            and re.fullmatch(self.places, place) is not None
        )


KNOWN_ORDERS: tuple[KnownOrder, ...] = (
    KnownOrder(
        "one-term",
        ("collective",), "all-reduce of masked values", "gather|add",
        "All devices but one add zeros, so that every order gives the same value: one has the token's row of the embedding, or with few "
        "rows the results that it now gives to all.",
        "nothing is needed.",
    ),
    KnownOrder(
        "tp-partials",
        ("collective",), "all-reduce|reduce-scatter",
        r"(mla_output|compressed_output|mlp)/.*|dot_general",
        "Each device of tp multiplies its own part of the depth, and the collective adds as many parts as there are devices.",
        "gather the parts of a fixed number of chunks of the depth and add them in one tree, on one device as well.",
    ),
    KnownOrder(
        "expert-partials",
        ("collective",), "reduce-scatter|all-reduce", r"experts/dispatch/.*",
        "With --dispatch gather a token's experts are added on their devices first, and then over devices.",
        "send the rows of all choices back and add them at home in the order of the choice.",
    ),
    KnownOrder(
        "expert-choices",
        ("reduce", "kernel"), "terms|experts_combine", r"experts/dispatch/(reduce_sum|experts/experts_combine/pallas_call)",
        "A token's experts on one device are added there, and the devices' parts at home or by a collective: "
        "which experts are added first the placement and the mesh decide.",
        "send the rows of all choices back and add them at home in the order of the choice.",
    ),
    KnownOrder(
        "overflow-rounds",
        ("loop",), ".*", r"experts/dispatch/while",
        "With --dispatch padded what finds no place in an exchange's capacity comes in a further round, which is added to the rounds "
        "before: a token's round depends on the others in its queue.",
        "keep the rows of all rounds apart by choice and add them once, in the order of the choice.",
    ),
    KnownOrder(
        "expert-rounds",
        ("loop",), ".*", r"experts/dispatch/experts/while",
        "A device computes its pairs in rounds of a bounded number, sorted by expert, and adds each token's to those of the rounds before.",
        "combine once, after the last round, in the order of the choice.",
    ),
    KnownOrder(
        "expert-scatter",
        ("scatter",), ".*", r"experts/dispatch/experts/scatter-add",
        "A token's experts are added in the order in which their pairs are sorted, which is that of physical experts.",
        "gather the rows of each choice and add them in the order of the choice.",
    ),
    KnownOrder(
        "product-tiles",
        ("kernel",), r"(dense|experts_gate_up|experts_down)(_fp\d)?", r".*/pallas_call",
        "The kernel's depth of a tile, its splits and its tile of rows are chosen by the rows and by what tp leaves of the columns.",
        "give it one depth, one tile of rows and no splits for every shape; the aim of splits, few rows, then costs bandwidth.",
    ),
    KnownOrder(
        "product-splits",
        ("reduce",), "terms", r"((mla|compressed)_(project|output)|mlp)/dense_splits/reduce_sum",
        "The parts of a product whose depth the kernel split: as many terms as splits, which the rows decide.",
        "no splits, or the same number of them for every shape.",
    ),
    KnownOrder(
        "head-tiles",
        ("kernel",), "absorb_keys|expand_values", r"attend_\w+/(absorb_keys|expand_values)/pallas_call",
        "The depth is always in chunks of 128, but a tile of 16, 32 or 64 rows is multiplied by other instructions of the tensor core, "
        "and no document says that they add alike.",
        "one tile of rows for every shape.",
    ),
    KnownOrder(
        "context-splits",
        ("kernel", "reduce"), "(latent|compressed)_attention|terms( of a product)?",
        r"attend_\w+/((latent|compressed)_attention/pallas_call|context_splits/.*)",
        "Blocks of the context begin at fixed positions, but few rows have their context split over programs, whose parts are merged; "
        "how many decides the number of rows, and where they begin the length of the row. The tile of rows follows the heads of a device.",
        "splits of a fixed number of positions, merged in order, and one tile of rows.",
    ),
    KnownOrder(
        "compiled-products",
        ("product", "reduce"), "dot|convolution|terms of a product",
        r"(router|head|(mla|compressed)_(project|output)|mlp|attend_\w+)/dot_general|dot_general",
        "The compiler chooses tiles and splits of the depth by the shape, and on a GPU that is there it chooses by timing, cuBLAS's "
        "products among others.",
        "multiply with the project's kernels, of fixed tiles.",
    ),
    KnownOrder(
        "entry-norms",
        ("reduce",), "terms", r"cache_write/(vmap\(\)/)?reduce_sum",
        "The mean square of a compressed entry's norm is of one entry, but how threads share it the compiler decides with the rest of the "
        "fusion, in which the rows and windows of a step count.",
        "write the sum as a tree over the width, or compute the norm in a kernel.",
    ),
    KnownOrder(
        "row-sums",
        ("reduce",), "terms", r"((mla_project|compressed_project|router|head)/)?reduce_sum",
        "The mean square of a norm, the sums of the router's scores and the sum of a token's streams are a row's own, but how threads "
        "share a row the compiler decides with the rest of the fusion, in which rows count.",
        "write these sums as a tree over the width, of elementwise additions, or in a kernel.",
    ),
)  # fmt: skip
"""Known reasons, in the order in which they are tried."""
