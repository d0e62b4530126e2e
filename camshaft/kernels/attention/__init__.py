"""Attention: causal self-attention over packed tokens, and the same against a paged KV cache."""
