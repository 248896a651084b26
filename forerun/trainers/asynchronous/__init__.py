"""RL where rollout and training happen at the same time (docs/async.md)."""
