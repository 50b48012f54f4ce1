"""What a target lacks, and what is done instead: dtypes, precision, operators, and operators that
are wrong on MPS.
"""
