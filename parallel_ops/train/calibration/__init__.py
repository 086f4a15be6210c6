"""The command `parallel-ops calibrate`: measures this machine's devices and writes a cluster for the planner."""
