"""One function per figure: numbers in, a `Picture` out."""
