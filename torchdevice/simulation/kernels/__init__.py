"""The kernels of simulated devices."""
