"""One file for each topology, which registers it (`weft.hw.topology.shape`). weft imports all files here."""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
