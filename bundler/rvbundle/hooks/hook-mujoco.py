"""mujoco: its renderers are chosen by MUJOCO_GL at run time; its plug-ins and models are data files."""

from PyInstaller.utils.hooks import collect_data_files, collect_dynamic_libs, collect_submodules

hiddenimports = collect_submodules("mujoco")
datas = collect_data_files("mujoco")
binaries = collect_dynamic_libs("mujoco")
