"""One file for each topology. weft imports all files here. Each file registers its topology (`weft.hw.topology.shape`)."""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
