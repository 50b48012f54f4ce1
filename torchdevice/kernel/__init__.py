"""What a CUDA program needs to run on another device.

It holds the context of a scope, the state of threads, patches, the description of devices, the
journal and the options that every scope has. It knows none of the features, which register with it
(``feature.py``).

May import ``errors``.
"""
