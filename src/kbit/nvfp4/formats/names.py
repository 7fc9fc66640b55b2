"""Names: what follows a weight's own for each of its parts, in a layer and in kbit's own checkpoints."""

from __future__ import annotations

CODES = "_codes"
SCALES = "_scales"
GLOBAL_SCALE = "_global_scale"
PARTS = (CODES, SCALES, GLOBAL_SCALE)
