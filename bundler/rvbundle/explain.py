"""Prints what `rvbundle_runtime.explaining` finds out."""

from typing import Any

from rvbundle.progress import line, wide_console
from rvbundle_runtime import format as fmt
from rvbundle_runtime.explaining import explain, explain_files

__all__ = ["explain", "explain_files", "print_files", "print_plan"]


def print_plan(report: dict[str, Any]) -> None:
    """Print what `explain` returned."""
    console = wide_console()
    console.print(line((f"{report['name']} {report['version']}", "bold"), " on this machine:"))
    for choice in report["choices"]:
        console.print(line(f"  {choice['what']:<15} {choice['value']}  ", (choice["reason"], "dim")))
    console.print(f"  {'starts':<15} {' '.join(report['argv'])}")
    if report["refused"]:
        console.print(line(("\nrun would refuse: ", "red"), report["refused"]["message"]))
        console.print(f"hint: {report['refused']['hint']}")
    traces = [" ".join(args) or "(no arguments)" for args in report["traces"] or []]
    console.print(f'\nBuilt with [trim] level = "{report["trim"]}" from these traces:')
    for number, text in enumerate(traces, 1):
        console.print(f"  {number}. {text}")
    for side in ("hot", "cold"):
        console.print(f"\n{side} files, by reason:")
        if report[side] is None:
            console.print("  (no usable cold pack lies beside the image)")
            continue
        for reason, count in report[side].items():
            console.print(f"  {count:>6}  {reason}")
    console.print("\nOne file's reason: rvbundle explain IMAGE --files 'torch/nn/*'", style="dim")


def print_files(rows: list[dict[str, Any]]) -> None:
    """Print what `explain_files` returned."""
    for row in rows:
        what = " (symbol tables)" if row["kind"] == fmt.TAIL else ""
        print(f"{row['side']:<4}  {row['path']}{what}\n      {row['reason']}")
    if not rows:
        print("no such file in the image or beside it in a cold pack")
