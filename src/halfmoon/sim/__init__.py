"""The cohort on this machine."""

from halfmoon.ground import Holdings
from halfmoon.sim.simulation import Simulation

__all__ = ["Holdings", "Simulation"]
