"""``verify=``: runs each operator of the target on the CPU too, and reports where the results
differ.

May import ``calls``, ``errors``, ``kernel``, ``report``, ``torch_modules`` and ``version``.
"""
