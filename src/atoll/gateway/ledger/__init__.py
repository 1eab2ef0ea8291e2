"""One row per request: what was asked, decided, answered and paid."""
