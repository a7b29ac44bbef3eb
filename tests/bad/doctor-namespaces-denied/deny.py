"""Run a command as a plain user on a kernel that allows no user namespaces: `deny.py COMMAND...`.

A user namespace whose own limit of user namespaces is 0 looks like such a machine to all that runs in it.
"""

import ctypes
import os
import sys

CLONE_NEWUSER = 0x10000000
uid, gid = os.getuid(), os.getgid()
if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER):
    sys.exit(os.strerror(ctypes.get_errno()))
for path, text in (
    ("/proc/self/setgroups", "deny"),
    ("/proc/self/uid_map", f"1000 {uid} 1"),
    ("/proc/self/gid_map", f"1000 {gid} 1"),
    ("/proc/sys/user/max_user_namespaces", "0"),
):
    with open(path, "w") as file:
        file.write(text)
os.execvp(sys.argv[1], sys.argv[1:])
