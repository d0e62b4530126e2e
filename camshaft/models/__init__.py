"""Model definitions, one architecture family a file, found by scanning this folder."""
