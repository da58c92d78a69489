"""What is trained, one file each."""
