"""Looks for a file without ever opening it, which no trace can see."""

import os
import tarfile

folder = os.path.dirname(tarfile.__file__)
print("help", os.path.exists(os.path.join(folder, "idlelib", "help.html")))
