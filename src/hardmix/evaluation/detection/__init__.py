"""Fine-tuning as a detector, following MoCo's detectron2 configuration."""
