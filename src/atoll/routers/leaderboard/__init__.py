"""The leaderboard: every router trained and measured on the same prompts, by the same definitions."""
