"""From what the user calls a model to a directory: a bundled name, a path, or a Hugging Face repository to download."""

from __future__ import annotations

import importlib.resources
import os
import re
from pathlib import Path

from dsjax.config import bundled_models
from dsjax.errors import UserError

# Weights, configuration, tokenizer, chat template, licence; no PyTorch pickles and no remote code. The encoder of V4's prompts is read as
# text, which shows which reasoning efforts the checkpoint knows.
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
    """A model that is neither here nor to be had; the message says what was tried."""


def resolve(model: str | Path, *, revision: str | None = None, cache_dir: str | Path | None = None) -> Path:
    """The directory of a model's files, downloaded if it must be.

    Tried in this order: a bundled name (``demo``), a local directory, a Hugging Face repository id
    (``deepseek-ai/DeepSeek-V3``). Downloads go through ``huggingface_hub``: they resume where they were interrupted, are
    kept in its cache (``HF_HOME``, or ``cache_dir``), and are not repeated. A bundled name wins over a directory of
    the same name; write ``./demo`` for the directory.

    Args:
        model: the name, path or repository id.
        revision: a branch, tag or commit of the repository; default its main branch.
        cache_dir: where downloads are kept; default huggingface_hub's own.

    Raises:
        ModelNotFoundError: none of the three, or a download that failed; the message says what to do instead.
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
    """What `load_config` reads for a model's name: the name or path itself; of a Hugging Face repository, which is neither, the
    folder of its downloaded `config.json`, without the weights.

    Raises:
        ModelNotFoundError: a repository that cannot be had.
    """
    _check_revision(model, revision)
    if model in bundled_models() or Path(os.path.expanduser(model)).exists() or not _REPOSITORY.fullmatch(model):
        return model
    return str(_download(model, revision, None, ("config.json",)))


def _check_revision(model: str, revision: str | None) -> None:
    """Refuse a revision of what is not downloaded."""
    if revision is None:
        return
    if model in bundled_models():
        raise ModelNotFoundError(f"{model} is bundled, which has no revisions; leave --revision out")
    if Path(os.path.expanduser(model)).exists():
        raise ModelNotFoundError(f"{model} is on this machine, where it has no revisions; leave --revision out")


def _bundled(name: str) -> Path:
    """The folder of a bundled model, if weights came with it."""
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
    # Imported here: it takes half a second, and only downloads need it.
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
        # A connection can fail in many ways, and huggingface_hub's versions name them after three HTTP libraries.
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
    """The first error of a chain, in one line."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}"
