"""What a target lacks: dtypes, precision and operators, with the replacement for each."""
