"""Scripts that run under the recipe's interpreter, not under rvbundle's own: standard library only."""
