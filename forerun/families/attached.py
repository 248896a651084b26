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
    # A block that reads the hidden before a norm drafts on from the one before its own: the shipped SmolLM2 head agrees
    # on 0.364 of second tokens so, and on 0.295 from the normed one, which is what vLLM hands on.
    recurrence="pre_norm",
    engine_zeroes_position_0=False,
    source="forerun.attach",
)
