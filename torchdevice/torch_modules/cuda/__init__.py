"""``torch.cuda``: one file for each file of it, with its supplied names, its patches and its
stand-in types.
"""
