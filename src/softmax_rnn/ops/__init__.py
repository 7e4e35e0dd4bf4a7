"""The operation: torch and numpy alone."""
