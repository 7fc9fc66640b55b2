"""Models by name: fetched from the Hugging Face Hub into its cache, which commands read like any folder."""

from __future__ import annotations

from pathlib import Path

from kbit.cli.model_folder import bars_on_terminals_only

# What transformers and kbit read of a model, folders of sentence-transformers included: no code, no pickles.
# Nor the same weights in other formats, in folders of their own or, as Mistral has them, beside.
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_NOT_READ = ("onnx/*", "openvino/*", "coreml/*", "metal/*", "original/*", "consolidated*.safetensors")
_SNAPSHOTS, _PREFIX = "snapshots", "models--"


def is_hub_name(model: str) -> bool:
    """Whether that is no path here and could be a name on a hub: ORG/MODEL, or ORG/MODEL@REVISION."""
    return not Path(model).exists() and model.count("/") == 1 and not model.startswith((".", "/", "~"))


def folder_of(model: Path) -> Path:
    """The folder of a model: itself, or that in the hub's cache if `model` is a name on the hub.

    Args:
        model: a local folder; or ORG/MODEL or ORG/MODEL@REVISION, of which what the cache lacks is fetched.

    Returns:
        A folder; `model` itself where it can be no name, so that whoever reads it says what is wrong.

    Raises:
        OSError: neither a folder nor a model that the hub gives; no space for it.
    """
    if not is_hub_name(str(model)):
        return model
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    bars_on_terminals_only()
    name, _, revision = str(model).partition("@")
    try:
        return Path(
            snapshot_download(
                name, revision=revision or None, allow_patterns=[*_FILES], ignore_patterns=[*_NOT_READ]
            )
        )
    except Exception as error:
        # The hub's library lets through errors of the one by which it speaks HTTP, httpx or httpx2.
        apart = isinstance(error, LocalEntryNotFoundError | ConnectionError)
        if apart or type(error).__module__.startswith("httpx"):
            why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
            remedy = "Unset it to fetch the model." if constants.HF_HUB_OFFLINE else "Check the connection."
            raise FileNotFoundError(
                f"{model} is not a folder here, {why} and its cache lacks the model. {remedy}"
            ) from error
        if not isinstance(error, HfHubHTTPError | HFValidationError):
            raise
        reason = " ".join(str(error).split()).removesuffix(".")
        raise FileNotFoundError(
            f"{model} is not a folder here, and the Hugging Face Hub did not give a model of that name: "
            f"{reason}. Is it spelled right? Models behind a gate need `hf auth login`."
        ) from None


def is_cached(folder: Path) -> bool:
    """Whether a model's folder is in the hub's cache."""
    place = folder.resolve().parent
    return place.name == _SNAPSHOTS and place.parent.name.startswith(_PREFIX)


def model_name(folder: Path) -> str:
    """What to call the model of a folder: ORG/MODEL if it is in the hub's cache, else the folder's name."""
    folder = folder.resolve()
    if is_cached(folder):
        return folder.parent.parent.name.removeprefix(_PREFIX).replace("--", "/", 1)
    return folder.name
