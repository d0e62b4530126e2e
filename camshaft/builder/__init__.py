"""Program → engine: the recipe, and the on-disk engine cache."""
