"""Where a model's files lie: a local directory as it is, or a hub id found in the local cache first, then online."""

from pathlib import Path

from draftsmith.errors import UserError

FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]  # what a target can be made of


def resolve(model: str, revision: str | None = None) -> Path:
    """Directory that holds the model `model` names.

    A hub id is looked up in the local Hugging Face cache and downloaded only when it is not there. UserError when it is
    neither a directory nor a hub id that can be had.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise UserError(f"{model}: is a file; name the directory that holds the model's config.json and weights")
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UserError(f"{model}: no such directory")
    return _from_hub(model, revision)


def _from_hub(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=FILES, local_files_only=True))
    except HFValidationError:
        raise UserError(f"{model}: neither a directory nor a hub id of the form OWNER/NAME") from None
    except LocalEntryNotFoundError:
        pass  # not in the cache
    at = f" at revision {revision}" if revision else ""
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=FILES))
    except GatedRepoError:
        raise UserError(f"{model}: gated on the hub; accept its terms there and log in with `hf auth login`") from None
    except RevisionNotFoundError:
        raise UserError(f"{model}: the hub has no revision {revision}") from None
    except RepositoryNotFoundError:
        raise UserError(f"{model}: neither a directory here nor a model on the hub that you may read") from None
    except (OfflineModeIsEnabled, LocalEntryNotFoundError):
        raise UserError(
            f"{model}{at}: not a directory, not in the local Hugging Face cache, and the hub cannot be reached; "
            "download it where there is a network (`hf download`) and name its directory"
        ) from None
    except HfHubHTTPError as error:
        raise UserError(f"{model}{at}: the hub refused: {error}") from None
