"""What a CUDA program needs to run on another device. It knows nothing of the features, which register with it."""
