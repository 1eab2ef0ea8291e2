"""Which model answers, and how good that choice was."""
