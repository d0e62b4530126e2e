"""Gated activations over a merged gate-up product."""
