"""The graph optimiser: one rewrite a file, found by scanning this folder, counted and verified."""
