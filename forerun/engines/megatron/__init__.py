"""Megatron-Core as a training engine: its GPTModel with its own MTP block, under Forerun's protocol."""
