"""Scheduling policies, one a file, found by scanning this folder: who goes first, who may enter, who gets tokens."""
