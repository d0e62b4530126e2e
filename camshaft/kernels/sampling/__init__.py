"""Sampling: from a row of logits to a token, and the uniform numbers it takes."""
