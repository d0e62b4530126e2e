"""The paged KV cache's books: life cycles, pools, prefix tree, eviction, and the manager that is their only door."""
