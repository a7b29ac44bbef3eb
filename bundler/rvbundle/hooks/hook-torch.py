"""torch: the stock hook collects every submodule, test and header; the graph alone finds what is imported.

What torch imports by name at run time is added here.
"""

hiddenimports = [
    "torch._C._distributed_c10d",
    "torch._prims",
    "torch._decomp",
    "torch._meta_registrations",
    "torch._refs",
    "torch.distributions",
    "torch.jit._builtins",
]
warn_on_missing_hiddenimports = False
