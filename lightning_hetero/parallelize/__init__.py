"""Parallel layouts applied to modules, one kind a file; ``apply`` has the order."""
