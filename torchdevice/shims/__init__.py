"""The Python-level places that neither the mode nor the bindings reach. Each file has a ``patches()`` function."""
