"""What a kernel of a GPU, or on a CPU an operator of PyTorch, is for: told by its name."""

from __future__ import annotations

import re

PYTHON = "between operators"  # what a profile of a CPU calls the rest of a step
# The first pattern found in the name decides; the last takes the rest.
_KINDS = (
    ("kbit", r"^kbit::|^(stream|grouped|resident|wgmma|mma(_sums)?|dequantize(_tiled)?|repack|quantize)$"),
    ("nvfp4", r"nvfp4"),
    ("kbit routing", r"^moe_|^norm_logits$"),
    ("linear attention", r"^gated_delta"),
    ("rotary, cache, masks", r"^(rotary(_angles)?|append_heads|cache_append|causal_mask|latent_heads)$"),
    ("sums over GPUs", r"^one_shot|nccl"),
    ("Python", rf"^{PYTHON}$"),
    (
        "attention",
        r"scaled_dot_product|^aten::_?softmax|fmha|flash|attention|^latent_|softmax_warp|softmax.*attn",
    ),
    (
        "16-bit products",
        r"^aten::(mm|addmm|bmm|baddbmm|matmul|linear|_grouped_mm)$|^mkldnn"
        r"|gemm|gemv|cutlass|nvjet|cublas|_mm_|sm\d+_xmma|splitK",
    ),
    ("convolution", r"conv"),
    ("sort, top-k", r"topk|sort|radix|gatherTopK|bitonic|Histogram|scan"),
    (
        "copy, gather, index",
        r"^aten::(_to_copy|to|clone|cat|embedding|repeat|expand|where|select|slice|view|empty)"
        r"|copy|index|gather|scatter|Cat|memcpy|memset|arange|fill",
    ),
    ("reduction", r"^aten::(mean|sum|amax|argmax|max|rsqrt|pow|cumsum)$|reduce|softmax|norm"),
    (
        "elementwise",
        r"^aten::(mul|add|sub|div|neg|silu|sigmoid|exp|sin|cos|softplus)_?$|elementwise|triton",
    ),
    ("other", r""),
)


def kind_of(name: str) -> str:
    """What a kernel or operator is for, judged by its name."""
    return next(kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE))
