"""Rotary position embedding: the table of cosines and sines, and the rotation of queries and keys."""
