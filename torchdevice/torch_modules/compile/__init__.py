"""``torch.compile`` and ``torch.export`` in a scope."""
