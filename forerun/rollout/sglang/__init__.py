"""A rollout engine in front of an SGLang server; what is known of its protocol stands in docs/rollout_sglang.md."""
