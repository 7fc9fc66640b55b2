"""The products that a device has to compute, a part of `kbit.nvfp4.kernels.Kernels`.

Accumulation contracts of `gemm` and `moe_gemm`, a[k] and w[k] being the products code * scale:
 * "exact": acc = the correctly rounded float32 of the exact sum over k. A zero sum is +0.
 * "seq16": acc = +0, then for each 16 columns, ascending, acc = acc + (their exact sum).
 * "tc": any order that is fixed for a device and a shape; on CPU it is that of seq16.
Then y = round_T((acc * w_scale) * row_scale), two roundings to float32 before that to T.
"""

from __future__ import annotations

from typing import Protocol

import torch

Tensor = torch.Tensor


class ProductKernels(Protocol):
    """Products of NVFP4 weights; see the module for the arithmetic of those of NVFP4 activations."""

    def tiles(self, accum: str) -> tuple[str, ...]:
        """Names of the tile and split choices that `gemm` and `moe_gemm` can be forced to under a contract.

        A choice that cannot take a shape is ignored for it.
        """
        ...

    def gemm(
        self,
        a_codes: Tensor,
        a_scales: Tensor,
        w_codes: Tensor,
        w_scales: Tensor,
        w_scale: float,
        row_scale: Tensor | None,
        accum: str,
        out_dtype: torch.dtype,
        tile: str | None = None,
    ) -> Tensor:
        """A [M, K16] times the transpose of W [N, K16] -> [M, N]; see the module for the arithmetic.

        Args:
            a_codes, a_scales: [M, K16 / 2], [M, K16 / 16].
            w_codes, w_scales: [N, K16 / 2], [N, K16 / 16].
            w_scale: product of both global scales, rounded to float32.
            row_scale: float32 [M] or None for 1.
            accum: "exact", "seq16" or "tc".
            out_dtype: T.
            tile: one of `tiles(accum)`; None lets the backend choose.
        """
        ...

    def gemm_tiled(
        self,
        a_codes: Tensor,
        a_scales: Tensor,
        tiled: Tensor,
        out_features: int,
        w_scale: float,
        row_scale: Tensor | None,
        accum: str,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """`gemm` under "exact" or "tc", with W in tiles.

        Args:
            tiled: uint8 [ceil(N / 16), ceil(K16 / 64), 576].
            out_features: N.
            The others: as in `gemm`.
        """
        ...

    def linear(self, x: Tensor, codes: Tensor, scales: Tensor, w_scale: float, bias: Tensor | None) -> Tensor:
        """x [..., K] of dtype T, not quantized, times the transpose of W [N, K16] decoded to T -> T [..., N].

        The order of sums is as free as under "tc". x may have any strides.
        """
        ...

    def linear_tiled(
        self, x: Tensor, tiled: Tensor, out_features: int, w_scale: float, bias: Tensor | None
    ) -> Tensor:
        """x [M, K] of dtype T, not quantized, times the transpose of W in tiles -> T [M, N].

        W's elements are code * scale; sums are multiplied by w_scale and bias is added in float32, or W's
        elements are multiplied and rounded to T first. The order of sums is as free as under "tc".
        """
        ...

    def moe_gemm(
        self,
        a_codes: Tensor,
        a_scales: Tensor,
        rows: Tensor | None,
        bounds: Tensor,
        w_codes: Tensor,
        w_scales: Tensor,
        w_scale: Tensor,
        row_scale: Tensor | None,
        accum: str,
        out_dtype: torch.dtype,
        tile: str | None = None,
    ) -> Tensor:
        """A product per sorted row r with its expert e, bounds[e] <= r < bounds[e + 1] -> [R, N].

        Args:
            a_codes, a_scales: rows of A.
            rows: int32 [R], the row of A that belongs to each sorted row; None: the same one, R = rows of A.
            bounds: int32 [E + 1]. Rows at and beyond bounds[E] give +0.
            w_codes, w_scales: [E, N, K16 / 2], [E, N, K16 / 16].
            w_scale: float32 [E], multiplied as in `gemm`.
            row_scale: float32, one per row of A (read at rows[r]), or None for 1.
            accum, out_dtype, tile: as in `gemm`.
        """
        ...

    def moe_gemm_tiled(
        self,
        a_codes: Tensor,
        a_scales: Tensor,
        rows: Tensor | None,
        bounds: Tensor,
        tiled: Tensor,
        out_features: int,
        w_scale: Tensor,
        row_scale: Tensor | None,
        accum: str,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """`moe_gemm` under "exact" or "tc", with W in tiles.

        Args:
            tiled: uint8 [E, ceil(N / 16), ceil(K16 / 64), 576].
            out_features: N.
            The others: as in `moe_gemm`.
        """
        ...

    def moe_linear_tiled(
        self, x: Tensor, bounds: Tensor, tiled: Tensor, out_features: int, w_scale: Tensor
    ) -> Tensor:
        """`linear_tiled` of each sorted row with its expert.

        Args:
            x: [R, K] of dtype T, sorted by expert.
            bounds: int32 [E + 1], as in `moe_gemm`; rows at and beyond bounds[E] give +0.
            tiled: uint8 [E, ceil(N / 16), ceil(K16 / 64), 576].
            out_features: N.
            w_scale: float32 [E].

        Returns:
            T [R, N].
        """
        ...
