"""Decode one weight of a k-bit checkpoint with numpy alone, as docs/format.md describes it.

    python examples/read_packed.py FOLDER model.layers.0.mlp.down_proj.weight [IN_FEATURES]

The name is that of the unquantized parameter, as in the file: experts that are stored one by one are read one
by one, and fused ones together. Without IN_FEATURES, columns are those of whole blocks of 32.
"""

import json
import sys
from pathlib import Path
from statistics import NormalDist

import numpy as np
from safetensors import safe_open

# Positive levels of the codebook "bof".
BOF = {
    2: "0.2892 1",
    3: "0.1062 0.3313 0.6014 1",
    4: "0.0470 0.1428 0.2435 0.3517 0.4707 0.6064 0.7710 1",
    5: "0.0211 0.0640 0.1080 0.1532 0.1992 0.2463 0.2950 0.3458 "
    "0.3993 0.4561 0.5170 0.5834 0.6567 0.7382 0.8293 1",
}


def levels_of(codebook, bits: int) -> np.ndarray:
    """float32 [2^bits]: the codebook that a config names or lists."""
    if not isinstance(codebook, str):
        return np.array(codebook[str(bits)] if isinstance(codebook, dict) else codebook, np.float32)
    if codebook == "nf":
        upper = np.array([NormalDist().inv_cdf((i + 0.5) / 2**bits) for i in range(2**bits // 2, 2**bits)])
        upper /= upper[-1]
    elif codebook == "bof":
        upper = np.array(BOF[bits].split(), np.float64)
    else:
        raise ValueError(f"codebook {codebook!r} is neither nf nor bof")
    return np.concatenate([-upper[::-1], upper]).astype(np.float32)


def read_packed(folder: Path, name: str, in_features: int | None = None) -> np.ndarray:
    """float32 [N, K], or [E, N, K]: the parameter `name`, decoded."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"there is no {folder / 'config.json'}: give the folder of a k-bit checkpoint"
        )
    config = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    if config.get("quant_method") != "kbit":
        raise ValueError(f"{folder} is no k-bit checkpoint: its config.json names no quantization by kbit")
    parts, others = {}, []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            keys = list(tensors.keys())
            parts |= {key: tensors.get_tensor(key) for key in keys if key.startswith(name + "_")}
            others += [key.removesuffix("_packed") for key in keys if key.endswith("_packed")]
    if name + "_packed" not in parts:
        such = f", but {len(others)} others such as {min(others)}" if others else ""
        raise ValueError(f"{folder} has no quantized parameter {name}{such}")
    packed, absmax = parts[name + "_packed"], parts[name + "_absmax"]
    scale = parts.get(name + "_scale", np.ones(packed.shape[:-2], np.float32))

    bits = packed.shape[-1] // absmax.shape[-1]
    words = packed.view(np.uint32).reshape(*absmax.shape, bits, 1)
    planes = words >> np.arange(32, dtype=np.uint32) & 1  # [..., blocks, bits, 32]
    codes = (planes << np.arange(bits, dtype=np.uint32)[:, None]).sum(-2)
    if absmax.dtype == np.uint8:  # E4M4
        absmax = (absmax.astype(np.uint16) << 6).view(np.float16).astype(np.float32) * 16
    w = levels_of(config["codebook"], bits)[codes] * absmax.astype(np.float32)[..., None]
    w *= scale[..., None, None, None]
    return w.reshape(*w.shape[:-2], -1)[..., :in_features]


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if len(arguments) not in (2, 3):
        sys.exit(__doc__)
    try:
        columns = int(arguments[2]) if arguments[2:] else None
        weight = read_packed(Path(arguments[0]), arguments[1], columns)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    print(f"{arguments[1]}: {weight.shape}, from {weight.min():.4f} to {weight.max():.4f}")
    print(weight)
