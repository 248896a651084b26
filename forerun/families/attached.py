"""A trunk that never had MTP and got a block from `forerun.attach`: MiMo's layout under the trunk's own model_type.

The layout is one that vLLM serves, so an attached head can be exported for serving without moving a tensor.
"""

from dataclasses import replace

from forerun.families.mimo import MIMO

ATTACHED = replace(
    MIMO,
    name="attached",
    model_types=(),
    trunk_model_type=None,
    architecture=None,
    engine_zeroes_position_0=False,
    source="forerun.attach",
)
