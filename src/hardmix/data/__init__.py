"""From files to views: data sets, decoding, augmentation, batches."""
