"""The options of `dsjax bench modules`."""

from dataclasses import dataclass

from dsjax.config.weights import ROW_FORMATS, WEIGHT_FORMATS
from dsjax.options import Checked, OptionError, option

MODULES = (
    "launch",
    "inputs",
    "embedding",
    "attention",
    "norms",
    "residual",
    "dense MLP",
    "router",
    "experts",
    "shared expert",
    "head",
    "fp8",
    "product",
    "dispatch",
)
"""The names of the modules, in the order of the tables."""
_QUICK_TOKENS, _QUICK_CONTEXTS = "1,32,256", "128,1024"


@dataclass(frozen=True)
class ModelOptions(Checked):
    """Model and number formats."""

    model: str = option("deepseek-v3", "Bundled name, or directory with config.json. Weights are not read.")
    dtype: str = option("auto", "Data type. auto: as dsjax serve.", choices=("auto", "float32", "bfloat16"))
    weights: str = option("auto", "Format of weight matrices. auto: as dsjax serve.", choices=("auto", *WEIGHT_FORMATS))
    activation_scheme: str = option("auto", "As in dsjax serve.", choices=("auto", "dynamic", *ROW_FORMATS, "none"))
    kv_cache_dtype: str = option("auto", "Data type of the KV cache.", choices=("auto", "float32", "bfloat16", "fp8"))
    kernels: str = option("auto", "Kernels, as in dsjax serve.", choices=("auto", "plain", "native", "pallas"))
    page_size: int | None = option(
        None, "Number of tokens per page (block) of the KV cache. Default: as dsjax serve.", least=1
    )
    max_model_len: int | None = option(None, "Maximum context length. Default: the model's, at most 4096.", least=16)
    seed: int = option(0, "Random seed for weights, tokens and routing.", least=0)


@dataclass(frozen=True)
class ModuleGrid(Checked):
    """Modules and sizes."""

    only: str | None = option(None, f"Time only these modules, separated by commas: {', '.join(MODULES)}")
    tokens: str = option("1,8,64,512,4096", "Numbers of tokens of a DP rank, separated by commas.")
    contexts: str = option("128,1024,4096", "Numbers of cached positions per request, separated by commas.")
    drafts: int = option(0, "Also time decode attention with this many draft tokens per request.", least=0)
    forms: str | None = option(None, "MLA forms, separated by commas. Default: those that have kernels.")
    experts: int | None = option(None, "Experts of the rank. Default: all, or a 32nd if memory is too small.", least=1)
    mesh: str = option("dp=1", "Also time every dispatch method on this mesh (emulated on a CPU).")
    one_rank_of: int | None = option(None, "Time the layers of one rank of this many, instead of modules.", least=1)
    layers: str = option("auto", "With --one-rank-of: number of MoE layers in memory. auto: as many as fit.")
    batch: int = option(32, "With --one-rank-of: number of requests per rank.", least=1)
    quick: bool = option(False, f"Use tokens {_QUICK_TOKENS}, contexts {_QUICK_CONTEXTS} and 0.2 s per row.")

    def __post_init__(self):
        super().__post_init__()
        unknown = [name for name in self.modules if name not in MODULES]
        if unknown:
            raise OptionError(f"--only names {', '.join(unknown)}; expected some of {', '.join(MODULES)}")
        if self.only and self.one_rank_of:
            raise OptionError(
                "--only chooses modules, and --one-rank-of times a step's layers instead; give one of them"
            )
        from dsjax.model.forms import FORMS

        unknown = [form for form in self.form_names if form not in FORMS]
        if unknown:
            raise OptionError(f"--forms names {', '.join(unknown)}; expected some of {', '.join(FORMS)}")
        self.token_counts, self.context_lengths  # noqa: B018 (checks both)
        if self.layers != "auto" and not (self.layers.isdecimal() and int(self.layers) >= 1):
            raise OptionError(f"--layers is {self.layers!r}, expected auto or a number of at least 1")

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules that `--only` names, or all."""
        return tuple(name.strip() for name in self.only.split(",")) if self.only else MODULES

    @property
    def token_counts(self) -> list[int]:
        """`--tokens`, ascending."""
        return self._numbers("tokens", _QUICK_TOKENS, 1)

    @property
    def context_lengths(self) -> list[int]:
        """`--contexts`, ascending."""
        return self._numbers("contexts", _QUICK_CONTEXTS, 0)

    def _numbers(self, name: str, quick: str, least: int) -> list[int]:
        text = getattr(self, name)
        if self.quick and text == type(self).__dataclass_fields__[name].default:
            text = quick
        try:
            numbers = sorted({int(part) for part in text.split(",")})
        except ValueError:
            numbers = []
        if not numbers or numbers[0] < least:
            raise OptionError(f"--{name} is {text!r}, expected whole numbers of at least {least}, separated by commas")
        return numbers

    @property
    def form_names(self) -> list[str]:
        """MLA forms that `--forms` names, or those with kernels."""
        from dsjax.model.forms import WITH_KERNELS

        return list(WITH_KERNELS) if self.forms is None else self.forms.split(",")


@dataclass(frozen=True)
class RunOptions(Checked):
    """Duration and output."""

    seconds: float | None = option(None, "Maximum seconds to sample a row. Default: 1; with --quick: 0.2.", above=0)
    row_limit: float = option(60.0, "Skip rows that take more seconds than this at the device's peak rates.", above=0)
    hardware: str | None = option(None, "Peak rates: name in configs/hardware, or file. Default: by device name.")
    json_file: str | None = option(None, "Also write JSON to this file; - for standard output.", flag="--json")
    progress: bool = option(True, "Show a progress bar.")
