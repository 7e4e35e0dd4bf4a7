"""The attention operation; it needs only torch and numpy."""
