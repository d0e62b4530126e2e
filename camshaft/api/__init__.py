"""The LLM API: the only layer that sees both the build side and the run side."""
