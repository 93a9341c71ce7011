"""Machines as data: each number with its unit and where it comes from."""

from weft.hw.machine import Machine, Quantity, known_machines, load_machine

__all__ = ["Machine", "Quantity", "known_machines", "load_machine"]
