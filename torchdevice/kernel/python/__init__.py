"""What all other files may use: Python's own machinery made safe, private names of torch, logs,
fidelity.
"""
