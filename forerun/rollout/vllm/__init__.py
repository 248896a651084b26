"""A rollout engine that is vLLM, in a process and an environment of its own."""

from forerun.rollout.vllm.engine import VLLMEngine
from forerun.rollout.vllm.launch import LaunchSettings

__all__ = ["LaunchSettings", "VLLMEngine"]
