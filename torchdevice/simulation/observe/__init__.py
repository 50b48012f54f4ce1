"""Recorders of the work of simulated devices: its order, races, copies in flight, shapes without
values.
"""
