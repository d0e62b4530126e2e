"""Frozen, documented, validated settings. Resolved once, above; passed down in parts."""
