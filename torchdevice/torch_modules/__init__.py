"""What stands in for names of torch: a folder for each module of torch's."""
