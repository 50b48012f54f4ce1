"""What is counted while a program runs: rewritten calls by the line that made them, and what verify
found.
"""
