"""The paper's printed numbers, and where each is printed."""
