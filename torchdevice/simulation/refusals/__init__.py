"""What an accelerator refuses and the CPU does not, and the errors that it raises."""
