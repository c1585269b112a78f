"""Find the model that a user names: a folder, or a name on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from megacp.storage.hub import download_command, is_hub_name
from megacp.storage.place import at_home

# The files that --load-hf reads. Other weight formats of a repository are not downloaded.
_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


def model_folder(name: str) -> Path:
    """Return the folder of a model, given its path or its name on the hub.

    A name is looked up in the cache of huggingface_hub, and downloaded if it is not there. Raise
    ValueError if there is neither a folder nor a model of that name, or if it cannot be downloaded.
    """
    folder = Path(at_home(name))
    if folder.is_dir():
        return folder
    # A file is probably one of the files of the model.
    if folder.exists():
        raise ValueError(f"MODEL {name} is a file; give the folder that contains it")
    if not is_hub_name(name):
        raise ValueError(
            f"MODEL {name}: no such folder, and not a name on the hub such as ORGANISATION/MODEL"
        )
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    """Return the folder in huggingface_hub's cache that contains a model."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise ValueError(
            f"MODEL {name} is not a folder here; a download from the hub needs huggingface_hub: "
            "pip install -e '.[hf]'"
        ) from error
    try:
        # With a network, this also checks for a newer version. Without one, it uses the cache.
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_FILES)))
    except errors.GatedRepoError as error:
        raise ValueError(
            f"MODEL {name} is gated: accept its terms on https://huggingface.co/{name}, then run "
            "`hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"MODEL {name}: no such folder here, and no such model on the hub. For a private "
            "model, run `hf auth login` first"
        ) from error
    # The library raises errors of several HTTP packages, and OSError if the disk is full.
    except Exception as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"MODEL {name} is not in the cache and cannot be downloaded ({first_line}). Run "
            f"`{download_command(name)}` on a machine with a network, and give that folder"
        ) from error
