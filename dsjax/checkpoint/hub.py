"""Resolve a model name to a directory: a bundled name, a path, or a Hugging Face repository to download."""

import importlib.resources
import os
import re
from pathlib import Path

from dsjax.config import bundled_models
from dsjax.errors import UserError

# Weights, configuration, tokenizer, chat template, licence; no PyTorch pickles and no remote code. `encoding_dsv4.py` is read as text, not
# run: it shows which reasoning efforts the checkpoint supports.
ALLOWED_FILES = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "tiktoken.model",
    "encoding/encoding_dsv4.py",
    "LICENSE*",
    "README.md",
)
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class ModelNotFoundError(UserError):
    """A model that was not found locally and cannot be downloaded. The message says what was tried."""


def resolve(model: str | Path, *, revision: str | None = None, cache_dir: str | Path | None = None) -> Path:
    """Return the directory of a model's files; download them if needed.

    Tries in this order: a bundled name (``demo``), a local directory, a Hugging Face repository id
    (``deepseek-ai/DeepSeek-V3``). ``huggingface_hub`` resumes interrupted downloads and caches the files
    (``HF_HOME``, or ``cache_dir``). A bundled name takes precedence over a directory of the same name; write
    ``./demo`` for the directory.

    Args:
        model: the name, path or repository id.
        revision: a branch, tag or commit of the repository; default: its main branch.
        cache_dir: download cache; default: huggingface_hub's.

    Raises:
        ModelNotFoundError: none of the three, or the download failed; the message says what to do instead.
    """
    text = str(model)
    _check_revision(text, revision)
    if text in bundled_models():
        return _bundled(text)
    path = Path(os.path.expanduser(text))
    if text and path.is_dir():
        return path
    if not _REPOSITORY.fullmatch(text) or text.startswith((".", "/", "~")):
        raise ModelNotFoundError(
            f"no model {text!r}: not a bundled name ({', '.join(bundled_models())}), not a directory here, and not a "
            "Hugging Face repository id (owner/name)"
        )
    return _download(text, revision, cache_dir)


def resolve_config(model: str, *, revision: str | None = None) -> str:
    """Return the argument of `load_config` for a model: its name or path as given; for a Hugging Face repository, the folder of its
    `config.json`, downloaded without the weights.

    Raises:
        ModelNotFoundError: the repository cannot be downloaded.
    """
    _check_revision(model, revision)
    if model in bundled_models() or Path(os.path.expanduser(model)).exists() or not _REPOSITORY.fullmatch(model):
        return model
    return str(_download(model, revision, None, ("config.json",)))


def _check_revision(model: str, revision: str | None) -> None:
    """Refuse a revision for a bundled or local model."""
    if revision is None:
        return
    if model in bundled_models():
        raise ModelNotFoundError(f"{model} is bundled, which has no revisions; leave --revision out")
    if Path(os.path.expanduser(model)).exists():
        raise ModelNotFoundError(f"{model} is on this machine, where it has no revisions; leave --revision out")


def _bundled(name: str) -> Path:
    """Return the folder of a bundled model; raise if it was bundled without weights."""
    folder = Path(str(importlib.resources.files("configs") / "models" / name))
    if not any(folder.glob("*.safetensors")):
        raise ModelNotFoundError(
            f"model {name!r} is bundled as a configuration without weights, which is enough for `dsjax info`; "
            "to serve it, give a directory that holds its weights, or a Hugging Face repository id (owner/name)"
        )
    return folder


def _download(
    repository: str, revision: str | None, cache_dir: str | Path | None, files: tuple[str, ...] = ALLOWED_FILES
) -> Path:
    # Imported here: the import takes half a second, and only downloads need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    wanted = f"{repository} (revision {revision or 'main'})"
    try:
        return Path(snapshot_download(repository, revision=revision, cache_dir=cache_dir, allow_patterns=list(files)))
    except HFValidationError as error:
        raise ModelNotFoundError(f"no model {repository!r}: not a directory here, and {error}") from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{repository} has no revision {revision!r} on the Hugging Face hub") from error
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{wanted} is gated: accept its terms on the Hugging Face hub, then `hf auth login` or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"no repository {repository} on the Hugging Face hub, no directory of that name here, and no bundled model; "
            "if it is private, set HF_TOKEN"
        ) from error
    except Exception as error:
        # A connection can fail in many ways, and huggingface_hub's versions raise the errors of three HTTP libraries.
        reason = "HF_HUB_OFFLINE is set" if _is_offline() else f"the download failed ({_root_cause(error)})"
        raise ModelNotFoundError(
            f"cannot download {wanted}: {reason}, and no complete copy is in the cache "
            f"({cache_dir or 'the default of huggingface_hub, see HF_HOME'}). Tried: bundled models "
            f"({', '.join(bundled_models())}), a directory of that name, the local cache, the Hugging Face hub. "
            "Where there is no network, download the files on another machine and give their directory with --model, "
            "or use --model demo; a download that was interrupted resumes when it is started again."
        ) from error


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _root_cause(error: BaseException) -> str:
    """Return the first error of a chain in one line."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}"
