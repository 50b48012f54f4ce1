"""How torch calls are intercepted, and how each is rewritten."""
