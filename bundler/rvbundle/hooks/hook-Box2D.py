"""Box2D: the extension module is imported by name from the package's own wrapper."""

from PyInstaller.utils.hooks import collect_dynamic_libs, collect_submodules

hiddenimports = collect_submodules("Box2D")
binaries = collect_dynamic_libs("Box2D")
