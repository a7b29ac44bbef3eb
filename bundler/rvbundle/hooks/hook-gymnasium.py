"""gymnasium: environments and vector entry points are registered as strings, so nothing imports them."""

from PyInstaller.utils.hooks import collect_data_files, collect_submodules

hiddenimports = collect_submodules("gymnasium.envs") + collect_submodules("gymnasium.wrappers")
datas = collect_data_files("gymnasium")
