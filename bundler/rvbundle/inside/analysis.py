"""Run PyInstaller's module graph over whole packages and keep what it forgets: who wanted what, and why.

    analysis.py TOOLS HOOKS SCRATCH < seeds.json > graph.json

TOOLS is the folder that PyInstaller lies in, HOOKS rvbundle's own hooks. The result:
{"edges": {module: [modules it imports]}, "hidden": [[module, hidden import, hook file]],
 "data": [[module, file]], "missing": number of imports that lead nowhere}
"""

import json
import os
import sys
from typing import Any, List

TOOLS, HOOKS, SCRATCH = sys.argv[1:4]
sys.path.append(TOOLS)
# sympy's and torch's largest modules nest deeper than the default allows when they are compiled.
sys.setrecursionlimit(10000)


def _configure() -> None:
    """Set what PyInstaller's own command line would set before it makes an Analysis."""
    from PyInstaller.config import CONF

    cache = os.path.join(SCRATCH, "cache")
    os.makedirs(cache, exist_ok=True)
    CONF.update(
        spec=os.path.join(SCRATCH, "agent.spec"),
        specpath=SCRATCH,
        specnm="agent",
        workpath=SCRATCH,
        distpath=SCRATCH,
        warnfile=os.path.join(SCRATCH, "warnings.txt"),
        cachedir=cache,
        noconfirm=True,
        code_cache={},
        hiddenimports=[],
        hookspath=[],
        ui_admin=False,
        ui_access=False,
        upx_available=False,
        main_package=None,
    )


def _record_hidden_imports() -> List[List[str]]:
    """Have every hook note its hidden imports; return the list that the notes go to."""
    from PyInstaller.depend import imphook

    notes: List[List[str]] = []
    original = imphook.ModuleHook._process_hidden_imports

    def noting(self: Any) -> Any:
        hook = os.path.basename(self.hook_filename)
        notes.extend([self.module_name, str(hidden), hook] for hidden in self.hiddenimports)
        return original(self)

    imphook.ModuleHook._process_hidden_imports = noting
    return notes


def _analyse(script: str, hidden: List[str]) -> Any:
    """Return the finished module graph: Analysis, stopped where it would turn to binaries."""
    from PyInstaller.building.build_main import Analysis
    from PyInstaller.depend.analysis import initialize_modgraph

    class GraphOnly(Analysis):  # type: ignore[misc]
        def assemble(self) -> None:
            self.graph = initialize_modgraph(excludes=self.excludes, user_hook_dirs=self.hookspath)
            self.datas: List[Any] = []
            self.binaries: List[Any] = []
            self.graph.path = self.pathex + self.graph.path
            self.graph.scan_legacy_namespace_packages()
            for name in self.inputs:
                self.graph.add_script(name)
            self.graph.add_hiddenimports(self.hiddenimports)
            self.graph.process_post_graph_hooks(self)

    return GraphOnly([script], hookspath=[HOOKS], hiddenimports=hidden).graph


def _name(node: Any) -> str:
    return str(node.identifier)


def main() -> None:
    """Write the graph to standard output.

    Whatever else is printed goes to standard error, also by the packages that hooks import in children
    (pygame greets its users).
    """
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    seeds = json.load(sys.stdin)
    script = os.path.join(SCRATCH, "rvbundle_seeds.py")
    with open(script, "w") as file:
        file.write("".join(f"try:\n    import {s}\nexcept ImportError:\n    pass\n" for s in seeds))
    _configure()
    hidden = _record_hidden_imports()
    graph = _analyse(script, [])
    edges: dict[str, List[str]] = {}
    data: List[List[str]] = []
    missing = 0
    for node in list(graph.iter_graph()):
        kind = type(node).__name__
        if kind in ("MissingModule", "InvalidSourceModule", "ExcludedModule"):
            missing += 1
            continue
        outgoing, _ = graph.get_edges(node)
        edges[_name(node)] = sorted({_name(other) for other in outgoing if other is not None})
        cache = graph._additional_files_cache
        for _, source in [*cache.datas(_name(node)), *cache.binaries(_name(node))]:
            data.append([_name(node), str(source)])
    edges.pop(script, None)
    json.dump({"edges": edges, "hidden": hidden, "data": data, "missing": missing}, output)
    output.close()


if __name__ == "__main__":  # hooks run in child processes that import this file again
    main()
