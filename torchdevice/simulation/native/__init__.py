"""The kernels of simulated devices in C++, which ``torchdevice native build`` compiles for the installed torch."""
