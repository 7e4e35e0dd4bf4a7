"""Speed and memory, measured; never asserted in the test suite."""
