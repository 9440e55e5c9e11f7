"""Builds wheels: one for each platform, since liblarder.so is in it, and good for every Python 3 there."""

from pathlib import Path

from setuptools import setup
from setuptools.dist import Distribution

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70.1
    from wheel.bdist_wheel import bdist_wheel

if not (Path(__file__).parent / "larder" / "liblarder.so").exists():
    raise SystemExit("larder/liblarder.so is missing: build it with `make python` first")


class PlatformWheel(bdist_wheel):
    """The library is called through ctypes, so that no Python's own ABI matters."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class WithLibrary(Distribution):
    """A distribution that is not pure Python."""

    def has_ext_modules(self):
        return True


setup(cmdclass={"bdist_wheel": PlatformWheel}, distclass=WithLibrary)
