"""Python that runs inside a payload (Python 3.9 to 3.14, standard library only)."""
