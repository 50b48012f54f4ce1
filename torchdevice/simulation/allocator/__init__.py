"""CUDA's caching allocator as a model, and the storages whose memory it counts."""
