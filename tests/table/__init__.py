"""The table of methods for the laws: one module per kind of method, one row per setting.

A new compressor needs one row here, and gets every law of test_methods.py.
"""

import importlib
import pkgutil

ROWS = [
    row
    for module in pkgutil.iter_modules(__path__)
    if module.name != "row"
    for row in importlib.import_module(f"{__name__}.{module.name}").ROWS
]
