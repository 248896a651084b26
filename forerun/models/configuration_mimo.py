"""Configuration of model_type mimo, which transformers does not ship.

This file is copied into exported checkpoints, for engines that trust remote code; it imports nothing of Forerun.
"""

from typing import Any

from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    """A Qwen2 trunk with `num_nextn_predict_layers` MTP layers."""

    model_type = "mimo"

    def __init__(self, *args: Any, num_nextn_predict_layers: int = 0, **kwargs: Any) -> None:
        self.num_nextn_predict_layers = num_nextn_predict_layers
        super().__init__(*args, **kwargs)
