"""In-flight batching: intake, capacity, micro-batches, KV pages, decoding state. Plain data in, increments out."""
