"""``torch.cuda``: for each of its files one, with supplied names, patches and stand-ins."""
