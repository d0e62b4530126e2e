"""KV blocks: writing a step's keys and values into pages of the cache."""
