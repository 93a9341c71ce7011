"""Simulation of schedules on modelled hardware: it computes the start and end of every step. No GPU is needed."""

from weft.sim.engine import simulate
from weft.sim.losses import Inefficiencies, inefficiencies
from weft.sim.machines import NULL, model_of
from weft.sim.model import Model
from weft.sim.result import Simulated
from weft.sim.run_time import Mode, run_us

__all__ = ["NULL", "Inefficiencies", "Mode", "Model", "Simulated", "inefficiencies", "model_of", "run_us", "simulate"]
