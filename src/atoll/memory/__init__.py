"""What agents know: shared, persistent, searchable. Nothing lives here yet."""
