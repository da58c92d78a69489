"""Networks: backbones by name, heads, and the pair of encoders."""
