"""Matrix products: ``linear``."""
