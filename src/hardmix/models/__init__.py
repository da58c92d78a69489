"""Networks: backbones by name, encoders with their heads, and batch norm across groups."""
