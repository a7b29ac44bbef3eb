"""ale-py: loaded through gymnasium's plug-in entry point; its ROMs are data files."""

from PyInstaller.utils.hooks import collect_data_files, collect_submodules

hiddenimports = collect_submodules("ale_py")
datas = collect_data_files("ale_py")
