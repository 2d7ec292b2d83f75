"""The cohort on this machine."""

from halfmoon.sim.simulation import Holdings, Simulation

__all__ = ["Holdings", "Simulation"]
