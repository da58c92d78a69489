"""The paper's measures and figures, for any run."""
