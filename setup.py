"""Compiles the kernels, where there is a C++ compiler, into the wheel or the source tree. All else is in setup.cfg.

They are plain shared libraries, so one wheel serves every Python of a platform; without them it serves every platform.
Of the instruction sets this CPU's best alone is compiled, which takes a third of the time: all if GRACE_ISAS=all asks
for them, as for a wheel that others install, or for another machine's platform.
"""

import importlib.util
import os
import platform
import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FOLDER = Path("grace", "kernels", "_lib")
spec = importlib.util.spec_from_file_location("build_kernels", Path(__file__).parent / FOLDER.with_name("build.py"))
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
# Python's own way to say for which platform extensions are built: _PYTHON_HOST_PLATFORM=linux-aarch64.
machine = sysconfig.get_platform().rpartition("-")[2]
machine = platform.machine().lower() if machine == "universal2" else machine
every = os.environ.get("GRACE_ISAS") == "all" or machine != kernels.MACHINE
SLOWER = "compression on CPUs. With a compiler, python -m grace.kernels.build --native adds them"


class BuildKernels(build_ext):
    """Each library by the one command that `grace.kernels.build` has for it, side by side."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or True

    def run(self):
        shutil.rmtree(Path(self.build_lib, FOLDER), ignore_errors=True)  # those of older sources
        super().run()

    def copy_extensions_to_source(self):
        FOLDER.mkdir(exist_ok=True)  # a fresh checkout has none
        super().copy_extensions_to_source()

    def get_ext_filename(self, fullname):
        return str(FOLDER / kernels.file_name(fullname.rpartition(".")[2], machine))

    def build_extension(self, ext):
        name = ext.name.rpartition(".")[2]
        target = Path(self.build_lib, self.get_ext_filename(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # One that was built before will do, unless somebody chose the compiler.
        found = None if os.environ.get("CXX") or machine != kernels.MACHINE else kernels.find(name)
        try:
            shutil.copy(found, target) if found else kernels.compile_library(name, target, machine)
        except RuntimeError as error:
            raise CompileError(f"{error}; GRACE works without, only slower: {SLOWER}") from error


class Wheel(bdist_wheel):
    """Of any Python 3."""

    def get_tag(self):
        plat = super().get_tag()[2]
        built = any(Path(self.get_finalized_command("build_ext").build_lib, FOLDER).glob("*.so"))
        return "py3", "none", plat if built else "any"


libraries = [
    Extension(f"grace.kernels._lib.{name}", [f"grace/kernels/{source}"], optional=True)
    for name, (source, *_) in kernels.libraries(machine).items()
    if every or name in kernels.native()
]
setup(ext_modules=libraries, cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel})
