"""Former module names, as aliases of the modules that replaced them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ALIASES = {
    "grace.blocks": "grace.ops.blocks",
    "grace.checks": "grace.ops.validate",
    "grace.collectives": "grace.core.collectives",
    "grace.communicators.base": "grace.core.communicator",
    "grace.method": "grace.core.method",
    "grace.packing": "grace.ops.packing",
    "grace.pipeline": "grace.engine.session",
    "grace.planner.measure": "grace.bench.costs",
    "grace.planner.options": "grace.communicators.planned.strategy",
    "grace.policies.base": "grace.core.policy",
    "grace.record": "grace.engine.record",
    "grace.registry": "grace.core.registry",
    "grace.report": "grace.engine.report",
    "grace.rng": "grace.core.rng",
    "grace.tensorflow.broadcast": "grace.keras.broadcast",
    "grace.tensorflow.callbacks": "grace.keras.callbacks",
    "grace.tensorflow.checks": "grace.keras.checks",
    "grace.tensorflow.keras": "grace.keras.optimizer",
    "grace.tensorflow.local": "grace.keras.local",
    "grace.tensorflow.names": "grace.keras.names",
}

SHELVES = {
    "measured": "bf16 blockint eden efsignsgd fp16 natural none onebit powersgd qsgd signsgd terngrad topk",
    "studies": (
        "acpsgd adacomp adaptive_random adaq arctopk atomo chain chunktopk cltk damped demo dettmers8 dgc dion fp8 "
        "geometric gradzip gtopk inceptionn kashin natural_dithering qsparse randomk shared_int sidco signum "
        "sketch sketch_sgd stc thc threelc threshold wangni"
    ),
}
"""By package of `grace.compressors`: the methods that were moved to it."""
ALIASES |= {
    f"grace.compressors.{name}": f"grace.compressors.{shelf}.{name}"
    for shelf, names in SHELVES.items()
    for name in names.split()
}


class AliasFinder(MetaPathFinder, Loader):
    """Imports the modules named in `ALIASES`; a module and its alias are one object."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in ALIASES else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(ALIASES[module.__name__])


sys.meta_path.append(AliasFinder())
