"""Python's machinery made safe, private names of torch, logs: usable by all other files."""
