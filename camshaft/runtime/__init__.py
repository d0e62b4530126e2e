"""Runs an engine: binds kernels, keeps device rows and KV pools, executes one StepPlan at a time."""
