"""Errors, ids, registry, environment, device facts and logging: what every layer may import."""
