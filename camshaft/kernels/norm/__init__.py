"""Normalisation over the last dimension, alone and joined with the residual add before it."""
