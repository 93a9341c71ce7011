"""One file for each topology. They are imported automatically, and each registers itself (`weft.hw.topology.shape`)."""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
