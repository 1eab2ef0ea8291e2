"""The subcommands of `atoll`, one file each."""
