"""Stand-ins for packages that exist only for CUDA, on torch's own operators.

``registry.py`` lists the packages and their names. ``finder.py`` lets a program import them in a
scope, ``askers.py`` decides who gets them, and ``libraries.py`` patches libraries that keep an
earlier answer. The other files have the functions of the packages, and are imported when the
program imports the package. Everything is written from the packages' public documentation.

May import ``calls``, ``kernel`` and ``torch_modules``.
"""
