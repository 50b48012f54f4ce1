"""What a target cannot do, done on the CPU: operators without a kernel, and float64."""
