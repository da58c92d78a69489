"""The loop: from images to an encoder."""
