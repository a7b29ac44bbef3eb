"""Insists on a file that it never opens, which no trace can see."""

import os
import sys
import tarfile

folder = os.path.dirname(tarfile.__file__)
if not os.path.exists(os.path.join(folder, "idlelib", "help.html")):
    sys.exit("where is the help?")
print("ready")
