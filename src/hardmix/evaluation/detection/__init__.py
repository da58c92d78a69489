"""Fine-tuning as a detector, as MoCo's configuration of detectron2 does it."""
