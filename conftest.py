"""Loads what the course mends in nbval, for the notebooks and for the tests alike."""

pytest_plugins = ["tools.nbval_mends"]
