"""The HTTP edge: one request, one page."""
