"""How torch's calls are seen, and which of them are rewritten in what way."""
