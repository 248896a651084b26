"""What vLLM's interpreter gets to see of ours."""

from __future__ import annotations

from pathlib import Path

from forerun.rollout.child import environment_without

INSIDE = Path(__file__).with_name("inside")  # the only files of ours that vLLM's interpreter may import
# It would have vLLM unpickle what it is sent.
_UNWANTED = ("VLLM_ALLOW_INSECURE_SERIALIZATION",)


def vllm_environment() -> dict[str, str]:
    """The environment variables that vLLM is started with."""
    # By PYTHONPATH vLLM's workers find the extension.
    return environment_without(_UNWANTED) | {"PYTHONPATH": str(INSIDE), "VLLM_NO_USAGE_STATS": "1"}
