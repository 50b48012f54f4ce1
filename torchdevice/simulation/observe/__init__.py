"""Recorders of simulated devices' work: order, races, copies in flight, valueless shapes."""
