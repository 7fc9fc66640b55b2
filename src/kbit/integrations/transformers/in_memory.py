"""What kbit's quantizers have in common: all layers are in memory, that of a CPU or of GPUs."""

from __future__ import annotations

from typing import Any

from kbit.integrations.transformers.inference_loads import leave


class InMemory:
    """Of quantizers whose models have no layers on disk; in front of transformers' HfQuantizer."""

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Look at a device map, the one that "auto" becomes too; see `placement.refuse_disk`.

        transformers calls it before it makes the model, so here a load leaves `torch.inference_mode`.
        """
        # Imported here because transformers' registry, which imports this module, comes before its loader.
        from kbit.integrations.transformers.placement import refuse_disk

        refuse_disk(device_map)
        leave()
