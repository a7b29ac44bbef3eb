"""stable-baselines3: policies are looked up by name; version.txt is read on import."""

from PyInstaller.utils.hooks import collect_data_files, collect_submodules

hiddenimports = collect_submodules("stable_baselines3")
datas = collect_data_files("stable_baselines3")
