"""What keeps the notebooks in order: run and normalise them, generate the exercises, check both."""
