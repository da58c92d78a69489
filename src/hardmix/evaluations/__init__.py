"""How good an encoder is: one file per evaluation."""
