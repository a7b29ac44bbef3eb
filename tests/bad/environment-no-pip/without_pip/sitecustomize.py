"""Hide pip from the interpreter that starts with this folder in PYTHONPATH."""

import sys

sys.modules["pip"] = None
