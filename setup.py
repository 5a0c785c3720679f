"""Compiled modules of mocker: one extension per .pyx, one set of flags.

MOCKER_DEBUG=1 builds with bounds checks, overflow checks and assertions; the default build has none of them.
Floating point stays strict in both: a fused multiply-add would change simulated times.
"""
import os
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("MOCKER_DEBUG") == "1"
DIRECTIVES = {
    "language_level": 3, "boundscheck": DEBUG, "wraparound": False, "cdivision": not DEBUG,
    "initializedcheck": DEBUG, "overflowcheck": False, "embedsignature": True, "freethreading_compatible": False,
}
if sys.platform == "win32":
    FLAGS = ["/O2", "/fp:precise"]
else:
    FLAGS = ["-O1" if DEBUG else "-O3", "-ffp-contract=off", "-fno-strict-aliasing"]
MACROS = [("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")]
if not DEBUG:
    MACROS.append(("CYTHON_WITHOUT_ASSERTIONS", "1"))

here = Path(__file__).parent
extensions = [
    Extension(f"mocker.{p.stem}", [f"mocker/{p.name}"], extra_compile_args=FLAGS, define_macros=MACROS)
    for p in sorted((here / "mocker").glob("*.pyx"))
]
setup(
    ext_modules=cythonize(extensions, compiler_directives=DIRECTIVES, nthreads=os.cpu_count() or 1,
                          build_dir="build/debug" if DEBUG else "build/release"),
    options={"build_ext": {"parallel": os.cpu_count() or 1}},
)
