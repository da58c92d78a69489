"""What a trained encoder is worth, one file each."""
