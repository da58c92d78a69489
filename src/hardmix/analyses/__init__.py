"""One file each: what a figure shows, taken from run folders. They share `records`."""
