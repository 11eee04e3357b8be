"""Examples that are run by the test suite."""
