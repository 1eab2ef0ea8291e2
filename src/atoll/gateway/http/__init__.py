"""One HTTP request and its answer, over ASGI: reading within limits, watching for a client that leaves, answering."""
