"""Detection and instance segmentation: a pre-trained encoder fine-tuned as a detector."""
