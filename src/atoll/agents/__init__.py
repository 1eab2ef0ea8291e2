"""Who works on a task, and who judges the work. Nothing lives here yet."""
