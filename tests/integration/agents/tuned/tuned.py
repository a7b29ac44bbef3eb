"""Multiplies matrices, and does what environment variables say: to be slow, to crash, to hang, to lie."""

import ctypes
import os
import shutil
import sys
import time

import numpy as np

a = np.random.RandomState(0).rand(64, 64).astype("float32")
for _ in range(20):
    a = a @ a / np.abs(a).max() / 64 + np.eye(64, dtype="float32")
print(f"trace {np.trace(a):.4f}", "wrongly" if os.environ.get("LIE") else "")
time.sleep(float(os.environ.get("NAP", "0")))
if os.environ.get("CRASH"):
    ctypes.string_at(0)
if os.environ.get("HANG"):
    time.sleep(3600)
if sys.argv[1:] == ["report"]:
    shutil.copyfile(os.environ["RVBUNDLE_RUNTIME"], "report.json")
if sys.argv[1:] == ["variables"]:
    print(*(f"{name}={value}" for name, value in sorted(os.environ.items())), sep="\n")
