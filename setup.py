"""Builds twinpool._native from src/native for the machine at hand. Without a compiler the package works on torch alone."""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

native = Pybind11Extension(
    "twinpool._native",
    sorted(glob("src/native/*.cpp")),
    depends=sorted(glob("src/native/*.h")),
    cxx_std=20,
    # No contraction: a fused multiply-add happens where the source says so, in every loop alike (see vec.h).
    extra_compile_args=[
        "-O3",
        "-march=native",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-pthread",
    ],
    extra_link_args=["-pthread"],
    optional=True,
)
ParallelCompile(default=0).install()
setup(ext_modules=[native])
