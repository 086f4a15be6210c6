"""The command `parallel-ops train`: its processes, signals and exit codes."""
