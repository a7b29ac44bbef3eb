"""What a self-running file's bootstrap executes; see `selfrun.py`."""

import sys

from rvbundle_runtime.selfrun import main

sys.exit(main(sys.argv[1:]))
