"""Machines and topologies as data: each number has a unit and a source. `weft.hw.host` has the available memory of this
host.
"""

from weft.hw import topology as topology  # topologies add keys of machine files
from weft.hw.here import machine_of
from weft.hw.host import available_memory_bytes
from weft.hw.machine import Machine, file_of, known_machines, load_machine
from weft.hw.quantity import Quantity

__all__ = ["Machine", "Quantity", "available_memory_bytes", "file_of", "known_machines", "load_machine", "machine_of"]
