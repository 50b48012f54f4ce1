"""The ways to the package that need no line of code: commands, pytest, notebooks, and a variable."""
