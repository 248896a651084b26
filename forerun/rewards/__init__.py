"""Rewards that can be verified, run where a hang or an exception costs one sample and not the run.

Nothing is imported here: the worker process imports `forerun.rewards.worker` and must start fast.
"""
