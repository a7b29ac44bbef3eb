"""pygame: optional parts are imported in try blocks, fonts and icons are data files."""

from PyInstaller.utils.hooks import collect_data_files, collect_dynamic_libs

hiddenimports = ["pygame.base", "pygame.surfarray", "pygame.freetype", "pygame.pkgdata"]
datas = collect_data_files("pygame")
binaries = collect_dynamic_libs("pygame")
