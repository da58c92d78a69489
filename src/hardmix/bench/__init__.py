"""The performance claims, measured where you are."""
