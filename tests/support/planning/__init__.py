"""Plans and scenarios of the planner."""
