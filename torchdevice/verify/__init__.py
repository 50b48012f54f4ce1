"""``verify=``: runs each of the target's operators on the CPU too, and reports differences.

May import ``calls``, ``errors``, ``kernel``, ``report``, ``torch_modules`` and ``version``.
"""
