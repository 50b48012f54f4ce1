"""``torch.cuda``, a file for each file of it: the names it stands on, its patches and its stand-in types."""
